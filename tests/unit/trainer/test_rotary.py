"""Megatron's angles, and its factor on queries and keys, are those of transformers' functions."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.kit.stores import tiny_spec
from trainer_service.megatron_engine.build import build_chunks, initialize_parallel, transformer_config
from weightsync.layouts.layout import Parallel

QWEN: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 1e6}
DEEPSEEK: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 4096}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CASES: dict[str, dict[str, Any]] = {
    "linear, no stretch": QWEN | {"rope_parameters": {"rope_type": "linear", "factor": 1.0}},
    "yarn": QWEN | {"rope_parameters": YARN},
    "yarn, older spelling": QWEN | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, length in the config": QWEN | {"rope_scaling": YARN, "max_position_embeddings": 131072},
    "yarn, another ramp": QWEN | {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2}},
    "yarn, not truncated": QWEN | {"rope_scaling": YARN | {"truncate": False}},
    "yarn, one mscale": QWEN | {"rope_scaling": YARN | {"mscale": 0.5}},
    "yarn, two mscales": QWEN | {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}},
    "yarn, odd factor": DEEPSEEK | {"rope_scaling": {"type": "yarn", "factor": 2.7}},
    "yarn, tiny": {"head_dim": 16, "max_position_embeddings": 16, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "linear": DEEPSEEK | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, odd factor": DEEPSEEK | {"rope_parameters": {"rope_type": "linear", "factor": 2.7}},
    "dynamic": DEEPSEEK | {"rope_scaling": {"type": "dynamic", "factor": 4}},
    "dynamic, odd factor": QWEN | {"rope_scaling": {"type": "dynamic", "factor": 2.7}},
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Megatron's groups of a single rank."""
    from megatron.core import parallel_state  # not before `build`, which prepares it for CPUs

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    initialize_parallel(Parallel(), 0, 60.0)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def angles_and_factor(entries: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """The first positions' angles, [positions, head_dim / 2], and the factor, as Megatron's attention has them."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    spec = tiny_spec("qwen2", num_hidden_layers=1, **entries)
    config = transformer_config(spec, Parallel(), torch.float32, False)
    (model,) = build_chunks(spec, config, 1.0, torch.device("cpu"))
    made = model.rotary_pos_emb(4)
    factor: float = yarn._yarn_get_concentration_factor_from_config(model.decoder.layers[0].self_attention.config)
    return (made[0] if isinstance(made, tuple) else made)[:, 0, 0, : spec.head_dim // 2], factor


def of_transformers(config: Any) -> tuple[torch.Tensor, float, int]:
    """Frequencies, [head_dim / 2], factor, and longest sequence of the scaling."""
    rope = config.rope_parameters
    longest = rope["factor"] * rope.get("original_max_position_embeddings", config.max_position_embeddings)
    # transformers' dynamic frequencies follow the length; SGLang's, and ours, are those of the longest sequence
    length = {"seq_len": longest} if rope["rope_type"] == "dynamic" else {}
    return *ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), **length), int(longest)


@pytest.mark.parametrize("entries", CASES.values(), ids=CASES)
def test_angles_and_factor_are_those_of_transformers(entries: dict[str, Any]) -> None:
    expected, expected_factor, _ = of_transformers(AutoConfig.for_model("qwen2", **entries))
    angles, factor = angles_and_factor(entries)
    torch.testing.assert_close(angles[1], expected, rtol=1.2e-7, atol=0)  # one rounding of float32
    torch.testing.assert_close(angles, torch.arange(4.0)[:, None] * expected, rtol=2.4e-7, atol=0)
    assert factor == pytest.approx(expected_factor, abs=1e-12)
