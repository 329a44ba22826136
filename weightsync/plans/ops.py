"""The transfer's unit: a block of elements from one rank's parameter to another's."""

import numpy as np
import numpy.typing as npt

# rows x cols elements: from (src_row, src_col) of src_param on rank src of the source layout
# to (dst_row, dst_col) of dst_param on rank dst of the target layout.
OP_FIELDS = (
    "src",
    "dst",
    "tensor",
    "src_param",
    "src_row",
    "src_col",
    "dst_param",
    "dst_row",
    "dst_col",
    "rows",
    "cols",
)
OP_DTYPE = np.dtype([(name, np.int64) for name in OP_FIELDS])
OpArray = npt.NDArray[np.void]


def elements(ops: OpArray) -> npt.NDArray[np.int64]:
    """Return the number of elements of each op, [ops]."""
    count: npt.NDArray[np.int64] = ops["rows"] * ops["cols"]
    return count


def cut_rows(
    ops: OpArray, counts: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
) -> tuple[OpArray, npt.NDArray[np.int64]]:
    """Cut ops into pieces by rows.

    Args:
        counts: [ops] pieces of each op, at least 1.
        begins: [pieces] first row of each piece within its op, ascending, the first 0.
    Returns: the non-empty pieces, in order, and their indices among all pieces.
    """
    op = np.repeat(np.arange(len(ops)), counts)
    last = np.cumsum(counts) - 1
    ends = np.append(begins[1:], 0)
    ends[last] = ops["rows"]
    pieces = ops[op]
    pieces["src_row"] += begins
    pieces["dst_row"] += begins
    pieces["rows"] = ends - begins
    kept = np.flatnonzero(pieces["rows"] > 0)
    return pieces[kept], kept
