"""The transfer plan: source shards intersected with target shards, every target element exactly once."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from servicekit.errors import ConfigError, Internal
from weightsync.layout import Layout, ShardArray

PLAN_FORMAT = 1

# A block of rows x cols elements: from (src_row, src_col) of src_param on rank src of the source layout
# to (dst_row, dst_col) of dst_param on rank dst of the target layout.
OP_DTYPE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "src", "dst", "tensor", "src_param", "src_row", "src_col",
            "dst_param", "dst_row", "dst_col", "rows", "cols",
        )
    ]
)  # fmt: skip
OpArray = npt.NDArray[np.void]
BOX = ["tensor", "row", "rows", "col", "cols"]


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Ops in their global order: by target rank, source rank, then the target's own tensor order."""

    source: Layout
    target: Layout
    ops: OpArray
    digest: str

    def elements_received(self, rank: int) -> int:
        """Elements that target rank `rank` gets."""
        mine = self.ops[self.ops["dst"] == rank]
        return int((mine["rows"] * mine["cols"]).sum())

    def redundancy(self) -> float:
        """Elements moved / elements of the target's shards; 1.0 is the least possible."""
        moved = int((self.ops["rows"] * self.ops["cols"]).sum())
        return moved / sum(self.target.elements_of(rank) for rank in range(self.target.num_ranks))


def make_plan(source: Layout, target: Layout) -> TransferPlan:
    """Plans the transfer.

    Copies of a source slice (data-parallel ranks) share the work: the least loaded one, by bytes, sends next.

    Raises:
        ConfigError: a tensor that one side has and the other lacks, or whose shape differs, by name.
        Internal: an element of the target would be written never or twice.
    """
    translate = _match_tensors(source, target)
    wanted = target.shards.copy()
    wanted["tensor"] = translate[wanted["tensor"]]
    offered, holders = _distinct_sources(source.shards[~source.shards["alias"]])
    ops, offer = _intersect(offered, wanted)
    ops["src"] = _share_load(ops, offer, offered, holders, source.num_ranks)
    ops = ops[np.lexsort((ops["dst_col"], ops["dst_row"], ops["dst_param"], ops["tensor"], ops["src"], ops["dst"]))]
    _check_exactly_once(ops, wanted, target)
    return TransferPlan(source=source, target=target, ops=ops, digest=_digest(source, target, ops))


def _match_tensors(source: Layout, target: Layout) -> npt.NDArray[np.int64]:
    """Source tensor id by target tensor id."""
    ids = {name: i for i, name in enumerate(source.tensors)}
    missing = [name for name in target.tensors if name not in ids]
    extra = sorted(set(source.tensors) - set(target.tensors))
    if missing or extra:
        raise ConfigError(f"layouts differ: the source lacks {missing[:3]}, the target lacks {extra[:3]}")
    translate = np.array([ids[name] for name in target.tensors], dtype=np.int64)
    differing = np.flatnonzero((source.tensor_shapes[translate] != target.tensor_shapes).any(axis=1))
    if len(differing) > 0:
        first = differing[0]
        raise ConfigError(
            f"shape of {target.tensors[first]}: {source.tensor_shapes[translate[first]].tolist()} at the source, "
            f"{target.tensor_shapes[first].tolist()} at the target"
        )
    return translate


def _distinct_sources(shards: ShardArray) -> tuple[ShardArray, list[npt.NDArray[np.int64]]]:
    """One shard per distinct box, and the indices of all shards that hold it (data-parallel copies)."""
    ordered = shards[np.lexsort([shards["rank"], *(shards[name] for name in reversed(BOX))])]
    boxes = np.stack([ordered[name] for name in BOX], axis=1)
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = (boxes[1:] != boxes[:-1]).any(axis=1)
    starts = np.flatnonzero(first)
    return ordered, np.split(np.arange(len(ordered)), starts[1:])


def _intersect(offered: ShardArray, wanted: ShardArray) -> tuple[OpArray, npt.NDArray[np.int64]]:
    """Every non-empty intersection of a distinct source box with a target box of the same tensor.

    Returns: ops without `src`; for each op the index of its distinct source box.
    """
    boxes = np.stack([offered[name] for name in BOX], axis=1)
    group = np.concatenate([[0], np.cumsum((boxes[1:] != boxes[:-1]).any(axis=1))]).astype(np.int64)
    distinct = offered[np.unique(group, return_index=True)[1]]
    begin = np.searchsorted(distinct["tensor"], wanted["tensor"], side="left")
    counts = np.searchsorted(distinct["tensor"], wanted["tensor"], side="right") - begin
    w = np.repeat(np.arange(len(wanted)), counts)
    s = np.arange(len(w)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begin, counts)
    a, b = distinct[s], wanted[w]
    row, col = np.maximum(a["row"], b["row"]), np.maximum(a["col"], b["col"])
    rows = np.minimum(a["row"] + a["rows"], b["row"] + b["rows"]) - row
    cols = np.minimum(a["col"] + a["cols"], b["col"] + b["cols"]) - col
    keep = (rows > 0) & (cols > 0)
    ops = np.zeros(int(keep.sum()), dtype=OP_DTYPE)
    a, b, row, col = a[keep], b[keep], row[keep], col[keep]
    ops["dst"], ops["tensor"], ops["rows"], ops["cols"] = b["rank"], b["tensor"], rows[keep], cols[keep]
    ops["dst_param"] = b["param"]
    ops["dst_row"], ops["dst_col"] = row - b["row"] + b["param_row"], col - b["col"] + b["param_col"]
    ops["src_param"] = a["param"]
    ops["src_row"], ops["src_col"] = row - a["row"] + a["param_row"], col - a["col"] + a["param_col"]
    return ops, s[keep]


def _share_load(
    ops: OpArray,
    offer: npt.NDArray[np.int64],
    offered: ShardArray,
    holders: list[npt.NDArray[np.int64]],
    num_ranks: int,
) -> npt.NDArray[np.int64]:
    """The sending rank of each op: the only holder of its box, or the least loaded of several (ties by rank)."""
    load = np.zeros(num_ranks, dtype=np.int64)
    size = ops["rows"] * ops["cols"]
    source = np.zeros(len(ops), dtype=np.int64)
    copies = np.array([len(group) for group in holders], dtype=np.int64)[offer]
    alone = copies == 1
    first_rank = offered["rank"][np.array([group[0] for group in holders], dtype=np.int64)]
    source[alone] = first_rank[offer[alone]]
    np.add.at(load, source[alone], size[alone])
    several = np.flatnonzero(~alone)
    for op in several[np.argsort(-size[several], kind="stable")]:
        ranks = offered["rank"][holders[offer[op]]]
        source[op] = ranks[np.argmin(load[ranks])]
        load[source[op]] += size[op]
    return source


def _check_exactly_once(ops: OpArray, wanted: ShardArray, target: Layout) -> None:
    """Counts elements by (rank, parameter): disjoint source boxes make an equal count mean exactly once."""
    width = len(target.params)
    need = np.zeros(target.num_ranks * width, dtype=np.int64)
    got = np.zeros_like(need)
    np.add.at(need, wanted["rank"] * width + wanted["param"], wanted["rows"] * wanted["cols"])
    np.add.at(got, ops["dst"] * width + ops["dst_param"], ops["rows"] * ops["cols"])
    wrong = np.flatnonzero(need != got)
    if len(wrong) > 0:
        rank, param = divmod(int(wrong[0]), width)
        raise Internal(
            f"plan covers {int(got[wrong[0]])} of {int(need[wrong[0]])} elements "
            f"of {target.params[param]} on rank {rank}"
        )


def _digest(source: Layout, target: Layout, ops: OpArray) -> str:
    """Position-sensitive digest of everything that both ends must agree on."""
    digest = xxhash.xxh3_128()
    for text in (f"tandem plan {PLAN_FORMAT}", *source.tensors, *source.params, *target.params):
        digest.update(text.encode() + b"\0")
    for layout in (source, target):
        digest.update(np.int64(layout.num_ranks).tobytes())
        digest.update(np.ascontiguousarray(layout.tensor_shapes).tobytes())
    digest.update(np.ascontiguousarray(ops).tobytes())
    return digest.hexdigest()
