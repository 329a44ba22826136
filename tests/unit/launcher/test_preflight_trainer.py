"""The trainer's parallel sizes against the model's: each that does not fit is named by its key."""

from typing import Any

import pytest

from launcher.check.model.trainer import check_trainer_sizes
from tandem_config.schema import TrainerSection
from weightsync.model.spec import ModelSpec

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 32,
}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}

YARN = {"type": "yarn", "factor": 4.0}

GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"tensor_parallel": 2, "pipeline_parallel": 3, "virtual_pipeline": 2}),
    (DENSE, {"tensor_parallel": 4}),  # two ranks share a KV head
    (DENSE, {"pipeline_parallel": 4, "first_stage_layers": 1, "last_stage_layers": 1}),
    (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2, "embedding_counts": True, "loss_counts": True}),
    (DENSE | {"rope_scaling": YARN}, {"context_parallel": 4}),
    (EXPERTS, {"data_parallel": 4, "expert_parallel": 4}),
    (EXPERTS, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}),
    (DENSE, {"recompute": "selective", "recompute_modules": ["mlp"]}),
    (EXPERTS | {"mlp_only_layers": [0]}, {"recompute": "selective", "recompute_modules": ["mlp", "moe"]}),
    (DENSE, {"recompute": "full", "pipeline_parallel": 2, "recompute_layers": 3}),
    # all layers have experts, so nothing divides the dense FFN size
    (EXPERTS | {"intermediate_size": 13}, {"tensor_parallel": 2, "sequence_parallel": True}),
]
BAD: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (DENSE | {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 4}, {"tensor_parallel": 12},
     "tensor_parallel", "KV heads (8)"),
    (DENSE | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 8},
     {"tensor_parallel": 8}, "tensor_parallel", "query, key and value rows (20)"),
    (DENSE, {"pipeline_parallel": 4}, "pipeline_parallel", "layers (6)"),
    (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2}, "virtual_pipeline", "3 layers of pipeline stage 0"),
    (DENSE, {"pipeline_parallel": 3, "first_stage_layers": 1}, "first_stage_layers", "5 layers of the middle"),
    (DENSE, {"pipeline_parallel": 2, "last_stage_layers": 7}, "last_stage_layers", "6 layers are not"),
    (DENSE, {"pipeline_parallel": 2, "loss_counts": True}, "loss_counts", "7 layers do not divide"),
    (DENSE, {"data_parallel": 2, "expert_parallel": 2}, "expert_parallel", "no experts"),
    (DENSE, {"data_parallel": 2, "expert_tensor_parallel": 2}, "expert_tensor_parallel", "no experts"),
    (EXPERTS, {"data_parallel": 3, "expert_parallel": 3}, "expert_parallel", "number of experts (4)"),
    (EXPERTS, {"data_parallel": 4, "expert_tensor_parallel": 4}, "expert_tensor_parallel", "expert FFN size (6)"),
    (EXPERTS, {"tensor_parallel": 2}, "sequence_parallel", "mixture of experts"),
    (DENSE, {"recompute": "selective", "recompute_modules": ["core_attn", "moe"]}, "recompute_modules", "has moe"),
    (EXPERTS, {"recompute": "selective", "recompute_modules": ["mlp"]}, "recompute_modules", "has mlp"),
    (DENSE, {"recompute": "full", "pipeline_parallel": 2, "recompute_layers": 4}, "recompute_layers", "the 3 layers"),
    (DENSE | {"rope_scaling": YARN | {"original_max_position_embeddings": 20}}, {"context_parallel": 3},
     "context_parallel", "YaRN's original_max_position_embeddings (20)"),
    (EXPERTS | {"mlp_only_layers": [0], "intermediate_size": 13}, {"tensor_parallel": 2, "sequence_parallel": True},
     "tensor_parallel", "FFN size (13)"),
]  # fmt: skip


def problems(config: dict[str, Any], sizes: dict[str, Any]) -> list[tuple[str, str]]:
    found = check_trainer_sizes(ModelSpec.from_config(config), TrainerSection(**sizes), lambda *_: True)
    return [(problem.key, problem.message) for problem in found]


@pytest.mark.parametrize(("config", "sizes"), GOOD)
def test_sizes_that_fit_have_no_problem(config: dict[str, Any], sizes: dict[str, Any]) -> None:
    assert problems(config, sizes) == []


@pytest.mark.parametrize(("config", "sizes", "key", "message"), BAD)
def test_a_size_that_does_not_fit_is_named(
    config: dict[str, Any], sizes: dict[str, Any], key: str, message: str
) -> None:
    ((found_key, found_message),) = problems(config, sizes)
    assert found_key == f"trainer.{key}"
    assert message in found_message


def test_sizes_that_are_not_valid_themselves_are_left_out() -> None:
    spec, sizes = ModelSpec.from_config(DENSE), TrainerSection(pipeline_parallel=4, tensor_parallel=3)
    assert list(check_trainer_sizes(spec, sizes, lambda *_: False)) == []
