"""Which stage holds which layers, against megatron-core's own arithmetic."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from servicekit.errors import ConfigError
from trainer_service.megatron_engine import cpu_shim
from weightsync.layouts.layout import Parallel
from weightsync.layouts.stages import chunks_of

SPLITS = [
    (8, Parallel()),
    (8, Parallel(pipeline=4)),
    (8, Parallel(pipeline=2, virtual_pipeline=2)),
    (16, Parallel(pipeline=4, virtual_pipeline=2)),
    (94, Parallel(pipeline=8, embedding_counts=True, loss_counts=True)),
    (7, Parallel(pipeline=4, embedding_counts=True)),
    (14, Parallel(pipeline=2, virtual_pipeline=4, embedding_counts=True, loss_counts=True)),
    (10, Parallel(pipeline=4, first_stage_layers=1, last_stage_layers=3)),
    (11, Parallel(pipeline=4, last_stage_layers=2)),
    (16, Parallel(pipeline=4, virtual_pipeline=2, first_stage_layers=2, last_stage_layers=6)),
]


@pytest.mark.parametrize(("num_layers", "parallel"), SPLITS)
def test_stages_are_those_of_megatron(num_layers: int, parallel: Parallel) -> None:
    assert cpu_shim.install() in (True, False)  # megatron.core imports on a host without CUDA only after it
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers or None,
        account_for_embedding_in_pipeline_split=parallel.embedding_counts,
        account_for_loss_in_pipeline_split=parallel.loss_counts,
        pipeline_dtype=torch.float32,
    )
    for chunk in chunks_of(num_layers, parallel):
        where = (config, chunk.index if virtual else None, chunk.stage)
        assert get_num_layers_to_build(*where) == chunk.num_layers
        assert get_transformer_layer_offset(*where) == chunk.first_layer


@pytest.mark.parametrize(("num_layers", "parallel"), SPLITS)
def test_every_layer_is_held_once(num_layers: int, parallel: Parallel) -> None:
    held = [
        layer for c in chunks_of(num_layers, parallel) for layer in range(c.first_layer, c.first_layer + c.num_layers)
    ]
    assert held == list(range(num_layers))


@pytest.mark.parametrize(
    ("num_layers", "changes", "named"),
    [
        (9, {"pipeline": 2}, "9 layers"),
        (8, {"pipeline": 2, "virtual_pipeline": 3}, "virtual chunks"),
        (8, {"pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 2}, "middle stages"),
        (8, {"pipeline": 2, "first_stage_layers": 4, "loss_counts": True}, "exclude"),
        (8, {"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 4}, "are not"),
    ],
)
def test_splits_that_do_not_fit_are_named(num_layers: int, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        chunks_of(num_layers, replace(Parallel(), **changes))
