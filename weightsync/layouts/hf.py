"""The layout of a Hugging Face checkpoint: all canonical tensors, whole, on one rank."""

import numpy as np

from weightsync.families.rule import Rule
from weightsync.layouts.layout import Layout, LayoutBuilder, Piece, local_shape, piece_array
from weightsync.layouts.placement import part_shape, rule_applies
from weightsync.model.spec import ModelSpec

_RANK_ZERO = np.zeros((1, 1), dtype=np.int64)


def hf_layout(spec: ModelSpec) -> Layout:
    """Make the layout with every canonical tensor whole on rank 0; a tied model has no lm_head.weight."""
    builder = LayoutBuilder(1)
    for rule in spec.rules():
        for layer in range(spec.num_layers if rule.stage == "layer" else 1):
            if rule.stage != "layer" or rule_applies(rule, spec, layer):
                for expert in range(spec.num_experts if rule.per_expert else 1):
                    _place(builder, rule, spec, layer, expert)
    return builder.build()


def _place(builder: LayoutBuilder, rule: Rule, spec: ModelSpec, layer: int, expert: int) -> None:
    for index, part in enumerate(rule.parts):
        rows, cols = part_shape(rule, index, spec)
        name = part.name.format(layer=layer, expert=expert)
        whole = Piece(tp_rank=0, part=0, row=0, rows=rows, col=0, cols=cols, param_row=0)
        builder.place(
            param=builder.parameter(name, local_shape(rows, cols, vector=part.cols == "one")),
            tensor_ids=[builder.tensor(name, rows, cols)],
            pieces=piece_array([whole]),
            ranks_by_tp=_RANK_ZERO,
        )
