"""Megatron-core's layout, as a pure function of the model and the parallel sizes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servicekit.errors import ConfigError
from weightsync.families.rule import Placement, Rule
from weightsync.layouts.layout import Layout, LayoutBuilder, Parallel, Piece, PieceArray, exact_share, piece_array
from weightsync.layouts.placement import (
    SAME_ON_BOTH_SIDES,
    ParameterCut,
    check_kv_heads,
    part_shape,
    rule_applies,
    split_vocabulary,
)
from weightsync.layouts.stages import ModelChunk, chunks_of
from weightsync.model.spec import ModelSpec

OUTPUT_LAYER = "output_layer.weight"
Ranks = npt.NDArray[np.int64]


def padded_vocabulary(spec: ModelSpec, tp: int) -> int:
    """Return the rows of the trainer's embedding: the smallest multiple of the tensor-parallel size."""
    return -(-spec.vocab_size // tp) * tp


def megatron_layout(spec: ModelSpec, parallel: Parallel) -> Layout:
    """Make the trainer's layout, in mcore's local spelling; parameters of chunk i > 0 are named "chunk<i>.<name>".

    Raises: ConfigError: a size does not divide.
    """
    builder = LayoutBuilder(parallel.world_size)
    grid = _Grid(spec, parallel)
    chunks = chunks_of(spec.num_layers, parallel)
    for rule in spec.rules():
        placed = _PlacedRule(rule=rule, grid=grid)
        if rule.stage == "layer":
            for chunk, layer in _layers(chunks):
                if rule_applies(rule, spec, layer):
                    placed.place(builder, chunk, layer)
        else:
            placed.place(builder, chunks[0] if rule.stage == "first" else chunks[-1], chunks[-1].first_layer)
    if spec.tied and parallel.pipeline > 1:
        embedding = next(rule for rule in spec.rules() if rule.stage == "first")
        _PlacedRule(rule=embedding, grid=grid).place(builder, chunks[-1], 0, alias=OUTPUT_LAYER)
    return builder.build()


def _layers(chunks: list[ModelChunk]) -> Iterator[tuple[ModelChunk, int]]:
    for chunk in chunks:
        for layer in range(chunk.first_layer, chunk.first_layer + chunk.num_layers):
            yield chunk, layer


class _Grid:
    """Ranks by coordinate.

    Megatron's order is tensor, context, data within a stage, stages outermost. Expert parallelism divides the same
    ranks in another way: expert tensor, expert, the rest.
    """

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        self.spec, self.parallel = spec, parallel
        self.experts_per_rank = exact_share(
            spec.num_experts, parallel.expert, "number of experts", "expert parallel size"
        )
        sharers = parallel.expert * parallel.expert_tensor
        if spec.num_experts > 0 and parallel.stage_size % sharers != 0:
            raise ConfigError(
                f"expert x expert tensor size {sharers} does not divide the {parallel.stage_size} ranks of a stage"
            )
        if spec.num_experts == 0 and sharers > 1:
            raise ConfigError("expert parallel sizes must be 1: the model has no experts")

    def dense(self, stage: int) -> Ranks:
        """Return the ranks of a stage, [TP, copies]."""
        return self._stage(stage).reshape(-1, self.parallel.tensor).T

    def expert(self, stage: int) -> Ranks:
        """Return the ranks of a stage, [EP x ETP, copies]; the row of (e, t) is e * ETP + t."""
        return self._stage(stage).reshape(-1, self.parallel.expert * self.parallel.expert_tensor).T

    def _stage(self, stage: int) -> Ranks:
        return np.arange(self.parallel.stage_size, dtype=np.int64) + stage * self.parallel.stage_size


@dataclass(frozen=True, kw_only=True)
class _PlacedRule:
    """A rule and the ranks of its parameters."""

    rule: Rule
    grid: _Grid

    def place(self, builder: LayoutBuilder, chunk: ModelChunk, layer: int, alias: str | None = None) -> None:
        """Place the rule's parameter of one layer, or the parameters of its experts."""
        prefix = f"chunk{chunk.index}." if chunk.index > 0 else ""
        name = prefix + (alias if alias is not None else self.rule.megatron[0])
        local = layer - chunk.first_layer
        if not self.rule.per_expert:
            self._place_one(builder, name.format(layer=local), layer, [0], self.grid.dense(chunk.stage), alias)
            return
        per_rank = self.grid.experts_per_rank
        for expert in range(per_rank):
            numbers = [ep * per_rank + expert for ep in range(self.grid.parallel.expert)]
            local_name = name.format(layer=local, expert=expert)
            self._place_one(builder, local_name, layer, numbers, self.grid.expert(chunk.stage), alias)

    def _place_one(
        self, builder: LayoutBuilder, name: str, layer: int, experts: list[int], ranks: Ranks, alias: str | None
    ) -> None:
        cut = _cut(self.rule, self.grid)
        builder.place(
            param=builder.parameter(name, cut.shape(self.rule)),
            tensor_ids=[
                builder.tensor(part.name.format(layer=layer, expert=expert), *part_shape(self.rule, i, self.grid.spec))
                for expert in experts
                for i, part in enumerate(self.rule.parts)
            ],
            pieces=_on_each_expert_rank(cut.pieces, self.rule, self.grid.parallel),
            ranks_by_tp=ranks,
            alias=alias is not None,
        )


def _on_each_expert_rank(pieces: PieceArray, rule: Rule, parallel: Parallel) -> PieceArray:
    """Repeat the pieces of one expert for the expert of every expert-parallel rank."""
    if not rule.per_expert:
        return pieces
    repeated = np.tile(pieces, parallel.expert)
    ep = np.repeat(np.arange(parallel.expert), len(pieces))
    repeated["tp_rank"] += ep * parallel.expert_tensor
    repeated["part"] += ep * len(rule.parts)
    return repeated


def _cut(rule: Rule, grid: _Grid) -> ParameterCut:
    spec, tp = grid.spec, grid.parallel.tensor
    if rule.per_expert:
        return SAME_ON_BOTH_SIDES[rule.placement](rule, spec, grid.parallel.expert_tensor)
    if rule.placement is Placement.QKV:
        return _cut_qkv(rule, spec, tp)
    if rule.placement is Placement.VOCABULARY:
        return split_vocabulary(rule, spec, tp, padded_vocabulary(spec, tp))
    return SAME_ON_BOTH_SIDES[rule.placement](rule, spec, tp)


def _cut_qkv(rule: Rule, spec: ModelSpec, tp: int) -> ParameterCut:
    """Cut the rows, which are in order of query group [its q heads | its k head | its v head], evenly over the ranks.

    With more ranks than groups, several ranks share a group, and a cut may be anywhere in q, k or v: mcore gathers the
    ranks' outputs before it separates the heads (attention.py, get_query_key_value_tensors).
    """
    check_kv_heads(spec, tp)
    exact_share(spec.num_heads, tp, "number of attention heads")
    _, cols = part_shape(rule, 0, spec)
    q_rows = spec.num_heads // spec.num_kv_heads * spec.head_dim
    heights = (q_rows, spec.head_dim, spec.head_dim)
    group_rows = sum(heights)
    share = exact_share(spec.num_kv_heads * group_rows, tp, "number of query, key and value rows")
    pieces = []
    for rank, part, group in _parts_on_ranks(tp, share, group_rows):
        top = group * group_rows + sum(heights[:part])
        first, end = max(top, rank * share), min(top + heights[part], (rank + 1) * share)
        pieces.append(
            Piece(
                tp_rank=rank,
                part=part,
                row=group * heights[part] + first - top,
                rows=end - first,
                col=0,
                cols=cols,
                param_row=first - rank * share,
            )
        )
    return ParameterCut(rows=share, cols=cols, pieces=piece_array(pieces))


def _parts_on_ranks(tp: int, share: int, group_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, part, query group) for the groups that a rank's rows overlap; its share of a part may be empty."""
    for rank in range(tp):
        for group in range(rank * share // group_rows, -(-(rank + 1) * share // group_rows)):
            for part in range(3):
                yield rank, part, group
