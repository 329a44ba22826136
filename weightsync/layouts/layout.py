"""A layout: the slices of canonical tensors that each rank holds, as flat numpy columns.

Every tensor is a matrix: rows are dim 0, columns dim 1; a vector has one column. A shard is a box of a canonical tensor
and the block of a rank's parameter, of the same size, that holds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.errors import ConfigError
from tandem_api.weights.v1 import weights_pb2

# row, col: the box's start in the canonical tensor; param_row, param_col: its start in the rank's parameter.
# An alias is a copy that is never a source (the output layer of a tied model on its last pipeline stage).
SHARD_DTYPE = np.dtype(
    [(name, np.int64) for name in ("rank", "tensor", "param", "row", "rows", "col", "cols", "param_row", "param_col")]
    + [("alias", np.bool_)]
)
ShardArray = npt.NDArray[np.void]
Ids = npt.NDArray[np.int64]

_SIZES = frozenset(("tensor", "pipeline", "data", "context", "expert", "expert_tensor", "virtual_pipeline"))


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Parallel sizes of one side, and the engine that has them; a size that does not apply is 1.

    Attributes:
        engine: as in `layouts/registry.py`; "": that of the side.
        first_stage_layers: layers of the first stage; 0: as many as the others.
        last_stage_layers: layers of the last stage; 0: as many as the others.
        embedding_counts: megatron-core's account_for_embedding_in_pipeline_split.
        loss_counts: megatron-core's account_for_loss_in_pipeline_split.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    first_stage_layers: int = 0
    last_stage_layers: int = 0
    embedding_counts: bool = False
    loss_counts: bool = False
    engine: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks; expert parallelism and virtual stages use the same ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tensor * self.data * self.context

    @classmethod
    def from_proto(cls, sizes: weights_pb2.ParallelSizes) -> "Parallel":
        """Read the wire form; an unset size (0) is 1."""
        values: dict[str, Any] = {name: getattr(sizes, name) for name in cls.__dataclass_fields__}
        return cls(**values | {name: max(1, values[name]) for name in _SIZES})

    def sizes(self) -> dict[str, int | bool]:
        """Return the sizes by name, as a checkpoint's meta.json has them."""
        return {name: size for name, size in asdict(self).items() if name != "engine"}

    def to_proto(self) -> weights_pb2.ParallelSizes:
        """Make the wire form."""
        return weights_pb2.ParallelSizes(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All shards of one side.

    Attributes:
        tensors: canonical names.
        tensor_shapes: [tensors, 2] rows and columns.
        params: parameter names.
        param_shapes: local shapes with padding, of 1 or 2 dimensions, equal on all ranks that have the parameter.
        rank_params: [pairs, 2] (rank, param), also of a parameter that is all padding.
        shards: see SHARD_DTYPE.
    """

    num_ranks: int
    tensors: tuple[str, ...]
    tensor_shapes: npt.NDArray[np.int64]
    params: tuple[str, ...]
    param_shapes: tuple[tuple[int, ...], ...]
    rank_params: npt.NDArray[np.int64]
    shards: ShardArray

    def parameters_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the local shapes of one rank's parameters, by name."""
        held = self.rank_params[self.rank_params[:, 0] == rank, 1]
        return {self.params[p]: self.param_shapes[p] for p in held}

    def elements_of(self, rank: int) -> int:
        """Count the elements of canonical tensors (no padding) that one rank holds."""
        mine = self.shards[self.shards["rank"] == rank]
        return int((mine["rows"] * mine["cols"]).sum())

    def only(self, rank: int) -> "Layout":
        """Return the layout with the shards of one rank; all ids stay, and the other ranks hold nothing."""
        mine = self.rank_params[:, 0] == rank
        return replace(self, shards=self.shards[self.shards["rank"] == rank], rank_params=self.rank_params[mine])


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of one part of a rule on one tensor-parallel rank."""

    tp_rank: int
    part: int
    row: int
    rows: int
    col: int
    cols: int
    param_row: int
    param_col: int = 0


PIECE_FIELDS = tuple(Piece.__dataclass_fields__)
PIECE_DTYPE = np.dtype([(name, np.int64) for name in PIECE_FIELDS])
PieceArray = npt.NDArray[np.void]


def piece_array(pieces: Iterable[Piece]) -> PieceArray:
    """Turn pieces into columns, without empty ones (of a rank with padding only)."""
    rows = [tuple(getattr(p, name) for name in PIECE_FIELDS) for p in pieces if p.rows > 0 and p.cols > 0]
    return np.array(rows, dtype=PIECE_DTYPE)


@dataclass
class LayoutBuilder:
    """Collects shards parameter by parameter; `build` turns them into columns."""

    num_ranks: int
    tensors: dict[str, int] = field(default_factory=dict)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    params: dict[str, int] = field(default_factory=dict)
    param_shapes: list[tuple[int, ...]] = field(default_factory=list)
    _rank_params: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _shards: list[ShardArray] = field(default_factory=list)

    def tensor(self, name: str, rows: int, cols: int) -> int:
        """Return the id of a canonical tensor; add a new name."""
        if name not in self.tensors:
            self.tensors[name] = len(self.tensors)
            self.shapes.append((rows, cols))
        return self.tensors[name]

    def parameter(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the id of a parameter; add a new name. Raises: ConfigError: it has another shape on another rank."""
        if name not in self.params:
            self.params[name] = len(self.params)
            self.param_shapes.append(shape)
        elif self.param_shapes[self.params[name]] != shape:
            raise ConfigError(f"parameter {name} has two shapes: {self.param_shapes[self.params[name]]} and {shape}")
        return self.params[name]

    def place(
        self,
        *,
        param: int,
        tensor_ids: Sequence[int],
        pieces: PieceArray,
        ranks_by_tp: npt.NDArray[np.int64],
        alias: bool = False,
    ) -> None:
        """Place a parameter on ranks.

        Args:
            param: id of the parameter.
            tensor_ids: canonical tensor of each part.
            pieces: boxes by tensor-parallel rank (a row of ranks_by_tp).
            ranks_by_tp: [TP, copies] global ranks of each tensor-parallel rank.
            alias: the parameter is a copy that is never a source.
        """
        flat = ranks_by_tp.reshape(-1)
        self._rank_params.append(np.stack([flat, np.full_like(flat, param)], axis=1))
        copies = ranks_by_tp.shape[1]
        block = np.zeros(len(pieces) * copies, dtype=SHARD_DTYPE)
        block["rank"] = ranks_by_tp[pieces["tp_rank"]].reshape(-1)
        block["tensor"] = np.repeat(np.asarray(tensor_ids, dtype=np.int64)[pieces["part"]], copies)
        block["param"] = param
        block["alias"] = alias
        for name in ("row", "rows", "col", "cols", "param_row", "param_col"):
            block[name] = np.repeat(pieces[name], copies)
        self._shards.append(block)

    def build(self) -> Layout:
        """Make the layout."""
        return Layout(
            num_ranks=self.num_ranks,
            tensors=tuple(self.tensors),
            tensor_shapes=np.array(self.shapes, dtype=np.int64).reshape(-1, 2),
            params=tuple(self.params),
            param_shapes=tuple(self.param_shapes),
            rank_params=np.concatenate(self._rank_params),
            shards=np.concatenate(self._shards),
        )


def local_shape(rows: int, cols: int, *, vector: bool) -> tuple[int, ...]:
    """Return the shape that an engine gives a parameter: vectors have one dimension."""
    return (rows,) if vector else (rows, cols)


def exact_share(total: int, ranks: int, what: str, by: str = "tensor parallel size") -> int:
    """Compute total / ranks.

    Args:
        what: name of the total, for the error.
        by: name of the divisor, for the error.
    Raises: ConfigError: it does not divide.
    """
    if total % ranks != 0:
        raise ConfigError(f"{what} = {total} does not divide by {by} {ranks}")
    return total // ranks
