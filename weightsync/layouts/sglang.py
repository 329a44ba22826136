"""SGLang's layout, as a pure function of the model and the parallel sizes of a replica."""

import numpy as np

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
from weightsync.model.spec import ModelSpec

# DEFAULT_VOCAB_PADDING_SIZE of sglang/srt/layers/vocab_parallel_embedding.py
VOCABULARY_PADDING = 64


def padded_vocabulary(spec: ModelSpec, tp: int) -> int:
    """Return the rows of SGLang's embedding: a multiple of 64, or of 64 x TP if TP does not divide the former."""
    padded = -(-spec.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if padded % tp == 0:
        return padded
    step = VOCABULARY_PADDING * tp
    return -(-spec.vocab_size // step) * step


def sglang_layout(spec: ModelSpec, parallel: Parallel) -> Layout:
    """Make a replica's layout: `expert` groups of its ranks divide the experts, the ranks of a group their FFN.

    Raises: ConfigError: a size does not divide.
    """
    if parallel.world_size != parallel.tensor:
        raise ConfigError("a rollout replica supports tensor and expert parallelism only")
    if parallel.expert > 1 and spec.num_experts == 0:
        raise ConfigError("expert parallel size must be 1: the model has no experts")
    builder = LayoutBuilder(parallel.tensor)
    for rule in spec.rules():
        layers = _layers(rule, spec)
        if layers:  # the sizes of a rule that no layer has (the dense MLP of a mixture) need not divide
            cut = _cut(rule, spec, parallel)
            for layer in layers:
                _place(builder, rule, spec, parallel, cut, layer)
    return builder.build()


def _layers(rule: Rule, spec: ModelSpec) -> list[int]:
    if rule.stage != "layer":
        return [0]
    return [layer for layer in range(spec.num_layers) if rule_applies(rule, spec, layer)]


def _place(
    builder: LayoutBuilder, rule: Rule, spec: ModelSpec, parallel: Parallel, cut: ParameterCut, layer: int
) -> None:
    shape = cut.shape(rule)
    pieces = cut.pieces
    experts = range(spec.num_experts) if rule.per_expert else range(1)
    if rule.per_expert:
        shape = (spec.num_experts // parallel.expert, *shape)
        pieces = _stacked(cut, rule, spec, parallel)
    builder.place(
        param=builder.parameter(rule.sglang.format(layer=layer), shape),
        tensor_ids=[
            builder.tensor(part.name.format(layer=layer, expert=expert), *part_shape(rule, i, spec))
            for expert in experts
            for i, part in enumerate(rule.parts)
        ],
        pieces=pieces,
        ranks_by_tp=np.arange(parallel.tensor, dtype=np.int64)[:, None],
    )


def _stacked(cut: ParameterCut, rule: Rule, spec: ModelSpec, parallel: Parallel) -> PieceArray:
    """Return the pieces of all experts in the stacked parameter, whose rows are [experts of the rank x rows of one]."""
    per_rank = exact_share(spec.num_experts, parallel.expert, "number of experts", "expert parallel size")
    expert = np.repeat(np.arange(spec.num_experts), len(cut.pieces))
    pieces = np.tile(cut.pieces, spec.num_experts)
    # Rank of the replica: expert-parallel groups are neighbours that share an expert's FFN.
    pieces["tp_rank"] += expert // per_rank * (parallel.tensor // parallel.expert)
    pieces["part"] += expert * len(rule.parts)
    pieces["param_row"] += expert % per_rank * cut.rows
    return pieces


def _cut(rule: Rule, spec: ModelSpec, parallel: Parallel) -> ParameterCut:
    tp = parallel.tensor
    if rule.per_expert:
        sharers = exact_share(tp, parallel.expert, "rollout tensor parallel size", "expert parallel size")
        return SAME_ON_BOTH_SIDES[rule.placement](rule, spec, sharers)
    if rule.placement is Placement.QKV:
        return _cut_qkv(rule, spec, tp)
    if rule.placement is Placement.VOCABULARY:
        return split_vocabulary(rule, spec, tp, padded_vocabulary(spec, tp))
    return SAME_ON_BOTH_SIDES[rule.placement](rule, spec, tp)


def _cut_qkv(rule: Rule, spec: ModelSpec, tp: int) -> ParameterCut:
    """Give each rank [q shard | k shard | v shard]; with fewer KV heads than ranks, neighbouring ranks share a head."""
    check_kv_heads(spec, tp)
    q_heads = exact_share(spec.num_heads, tp, "number of attention heads")
    kv_heads, sharers = max(1, spec.num_kv_heads // tp), max(1, tp // spec.num_kv_heads)
    _, cols = part_shape(rule, 0, spec)
    heights = (q_heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.head_dim)
    pieces = [
        Piece(
            tp_rank=r,
            part=part,
            row=(r if part == 0 else r // sharers) * heights[part],
            rows=heights[part],
            col=0,
            cols=cols,
            param_row=sum(heights[:part]),
        )
        for r in range(tp)
        for part in range(3)
    ]
    return ParameterCut(rows=sum(heights), cols=cols, pieces=piece_array(pieces))
