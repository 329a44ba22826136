"""Where SGLang keeps each slice, as a pure function of the model and the tensor-parallel size."""

import numpy as np

from servicekit.errors import ConfigError
from weightsync.layout import Layout, LayoutBuilder, Parallel, Piece, exact_share, local_shape
from weightsync.mapping import Placement, Rule, rules_for
from weightsync.model_spec import ModelSpec
from weightsync.placement import SAME_ON_BOTH_SIDES, is_vector, part_shape, split_vocabulary

# DEFAULT_VOCAB_PADDING_SIZE of sglang/srt/layers/vocab_parallel_embedding.py
VOCABULARY_PADDING = 64


def padded_vocabulary(spec: ModelSpec, tp: int) -> int:
    """Rows of SGLang's embedding: a multiple of 64, or of 64 x TP where the former does not divide."""
    padded = -(-spec.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if padded % tp == 0:
        return padded
    step = VOCABULARY_PADDING * tp
    return -(-spec.vocab_size // step) * step


def sglang_layout(spec: ModelSpec, parallel: Parallel) -> Layout:
    """A rollout replica's layout. Raises: ConfigError: a size does not divide."""
    if parallel.world_size != parallel.tensor:
        raise ConfigError("a rollout replica supports tensor parallelism only")
    builder = LayoutBuilder(parallel.tensor)
    for rule in rules_for(spec):
        for layer in range(spec.num_layers if rule.stage == "layer" else 1):
            _place(builder, rule, spec, parallel.tensor, layer)
    return builder.build()


def _place(builder: LayoutBuilder, rule: Rule, spec: ModelSpec, tp: int, layer: int) -> None:
    (rows, cols), pieces = _cut(rule, spec, tp)
    shape = local_shape(rows, cols, vector=is_vector(rule))
    builder.place(
        param=builder.parameter(rule.sglang.format(layer=layer), shape),
        tensor_ids=[
            builder.tensor(part.name.format(layer=layer), *part_shape(rule, i, spec))
            for i, part in enumerate(rule.parts)
        ],
        pieces=pieces,
        ranks_by_tp=np.arange(tp, dtype=np.int64)[:, None],
    )


def _cut(rule: Rule, spec: ModelSpec, tp: int) -> tuple[tuple[int, int], list[Piece]]:
    if rule.placement is Placement.QKV:
        return _cut_qkv(rule, spec, tp)
    if rule.placement is Placement.VOCABULARY:
        return split_vocabulary(rule, spec, tp, padded_vocabulary(spec, tp))
    return SAME_ON_BOTH_SIDES[rule.placement](rule, spec, tp)


def _cut_qkv(rule: Rule, spec: ModelSpec, tp: int) -> tuple[tuple[int, int], list[Piece]]:
    """[q shard | k shard | v shard]; with fewer KV heads than ranks, neighbouring ranks hold the same head."""
    q_heads = exact_share(spec.num_heads, tp, "number of attention heads")
    if spec.num_kv_heads >= tp:
        kv_heads, sharers = exact_share(spec.num_kv_heads, tp, "number of KV heads"), 1
    elif tp % spec.num_kv_heads == 0:
        kv_heads, sharers = 1, tp // spec.num_kv_heads
    else:
        raise ConfigError(f"tensor parallel size {tp} and {spec.num_kv_heads} KV heads: one must divide the other")
    _, cols = part_shape(rule, 0, spec)
    heights = (q_heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.head_dim)
    pieces = []
    for r in range(tp):
        for part in range(3):
            block = r if part == 0 else r // sharers
            start = sum(heights[:part])
            pieces.append(
                Piece(
                    tp_rank=r,
                    part=part,
                    row=block * heights[part],
                    rows=heights[part],
                    col=0,
                    cols=cols,
                    param_row=start,
                )
            )
    return (sum(heights), cols), pieces
