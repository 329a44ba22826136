"""Where Megatron-core keeps each slice, as a pure function of the model and the parallel sizes."""

import numpy as np
import numpy.typing as npt

from servicekit.errors import ConfigError
from weightsync.layout import Layout, LayoutBuilder, Parallel, Piece, exact_share, local_shape
from weightsync.mapping import Placement, Rule, rules_for
from weightsync.model_spec import ModelSpec
from weightsync.placement import SAME_ON_BOTH_SIDES, is_vector, part_shape, split_vocabulary

OUTPUT_LAYER = "output_layer.weight"


def padded_vocabulary(spec: ModelSpec, tp: int) -> int:
    """Rows of the trainer's embedding: the smallest multiple of the tensor-parallel size."""
    return -(-spec.vocab_size // tp) * tp


def stage_ranks(parallel: Parallel, stage: int) -> npt.NDArray[np.int64]:
    """[TP, copies] global ranks of a pipeline stage; Megatron's order is tensor, context, data, pipeline."""
    tp, cp, dp = parallel.tensor, parallel.context, parallel.data
    grid = np.arange(tp * cp * dp, dtype=np.int64).reshape(dp, cp, tp) + stage * tp * cp * dp
    return grid.transpose(2, 0, 1).reshape(tp, -1)


def megatron_layout(spec: ModelSpec, parallel: Parallel) -> Layout:
    """The trainer's layout, in mcore's local spelling.

    Raises: ConfigError: a size does not divide, or the parallel form is not supported yet.
    """
    if max(parallel.context, parallel.expert, parallel.expert_tensor, parallel.virtual_pipeline) > 1:
        raise ConfigError("the trainer supports tensor, pipeline and data parallelism; all other sizes must be 1")
    layers = exact_share_of_layers(spec, parallel.pipeline)
    builder = LayoutBuilder(parallel.world_size)
    for rule in rules_for(spec):
        if rule.stage == "layer":
            for layer in range(spec.num_layers):
                _place(builder, rule, spec, parallel, stage=layer // layers, layer=layer, local=layer % layers)
        else:
            stage = 0 if rule.stage == "first" else parallel.pipeline - 1
            _place(builder, rule, spec, parallel, stage=stage, layer=0, local=0)
    if spec.tied and parallel.pipeline > 1:
        embedding = next(rule for rule in rules_for(spec) if rule.stage == "first")
        _place(builder, embedding, spec, parallel, stage=parallel.pipeline - 1, layer=0, local=0, alias=OUTPUT_LAYER)
    return builder.build()


def exact_share_of_layers(spec: ModelSpec, pipeline: int) -> int:
    """Layers per stage. Raises: ConfigError: they do not divide."""
    if spec.num_layers % pipeline != 0:
        raise ConfigError(f"{spec.num_layers} layers do not divide by pipeline parallel size {pipeline}")
    return spec.num_layers // pipeline


def _place(
    builder: LayoutBuilder,
    rule: Rule,
    spec: ModelSpec,
    parallel: Parallel,
    *,
    stage: int,
    layer: int,
    local: int,
    alias: str | None = None,
) -> None:
    (rows, cols), pieces = _cut(rule, spec, parallel.tensor)
    name = alias if alias is not None else rule.megatron[0].format(layer=local)
    builder.place(
        param=builder.parameter(name, local_shape(rows, cols, vector=is_vector(rule))),
        tensor_ids=[
            builder.tensor(part.name.format(layer=layer), *part_shape(rule, i, spec))
            for i, part in enumerate(rule.parts)
        ],
        pieces=pieces,
        ranks_by_tp=stage_ranks(parallel, stage),
        alias=alias is not None,
    )


def _cut(rule: Rule, spec: ModelSpec, tp: int) -> tuple[tuple[int, int], list[Piece]]:
    if rule.placement is Placement.QKV:
        return _cut_qkv(rule, spec, tp)
    if rule.placement is Placement.VOCABULARY:
        return split_vocabulary(rule, spec, tp, padded_vocabulary(spec, tp))
    return SAME_ON_BOTH_SIDES[rule.placement](rule, spec, tp)


def _cut_qkv(rule: Rule, spec: ModelSpec, tp: int) -> tuple[tuple[int, int], list[Piece]]:
    """Rows by query group: [its q heads | its k head | its v head]; ranks share the groups."""
    groups = exact_share(spec.num_kv_heads, tp, "number of KV heads")
    _, cols = part_shape(rule, 0, spec)
    q_rows = spec.num_heads // spec.num_kv_heads * spec.head_dim
    heights = (q_rows, spec.head_dim, spec.head_dim)
    group_rows = sum(heights)
    pieces = [
        Piece(
            tp_rank=r,
            part=part,
            row=(r * groups + g) * heights[part],
            rows=heights[part],
            col=0,
            cols=cols,
            param_row=g * group_rows + sum(heights[:part]),
        )
        for r in range(tp)
        for g in range(groups)
        for part in range(3)
    ]
    return (groups * group_rows, cols), pieces
