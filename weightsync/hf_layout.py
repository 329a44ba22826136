"""The canonical tensors themselves as a layout of one rank: what a Hugging Face checkpoint holds."""

import numpy as np

from weightsync.layout import Layout, LayoutBuilder, Piece, local_shape
from weightsync.mapping import rules_for
from weightsync.model_spec import ModelSpec
from weightsync.placement import is_vector, part_shape


def hf_layout(spec: ModelSpec) -> Layout:
    """Every canonical tensor whole, under its own name, on rank 0. A tied model has no lm_head.weight."""
    builder = LayoutBuilder(1)
    rank_zero = np.zeros((1, 1), dtype=np.int64)
    for rule in rules_for(spec):
        for layer in range(spec.num_layers if rule.stage == "layer" else 1):
            for index, part in enumerate(rule.parts):
                rows, cols = part_shape(rule, index, spec)
                name = part.name.format(layer=layer)
                builder.place(
                    param=builder.parameter(name, local_shape(rows, cols, vector=is_vector(rule))),
                    tensor_ids=[builder.tensor(name, rows, cols)],
                    pieces=[Piece(tp_rank=0, part=0, row=0, rows=rows, col=0, cols=cols, param_row=0)],
                    ranks_by_tp=rank_zero,
                )
    return builder.build()
