"""The model's angles, and its factor on queries and keys, are those of transformers' functions; rotating by them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.kit.stores import tiny_spec
from trainer_service.megatron_engine.attention.rotary import Rotation
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
    """The first positions' angles, [positions, head_dim / 2], and the factor, as the model's attention has them."""
    spec = tiny_spec("qwen2", num_hidden_layers=1, **entries)
    config = transformer_config(spec, Parallel(), torch.float32, False)
    (model,) = build_chunks(spec, config, 1.0, torch.device("cpu"))
    made = model.rotary_pos_emb(4)
    angles = (made[0] if isinstance(made, tuple) else made)[:, 0, 0, : spec.head_dim // 2]
    rotation = model._rotation(torch.tensor([[3, 0, 1]]), 4)
    factor = float(rotation.cos[1, 0, 0])  # at position 0
    expected = angles[[3, 0, 1], None]
    torch.testing.assert_close(rotation.cos, expected.cos() * factor, rtol=0, atol=0)
    torch.testing.assert_close(rotation.sin, expected.sin() * factor, rtol=0, atol=0)
    return angles, factor


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
    assert factor == pytest.approx(expected_factor, rel=6e-8)  # in float32


def test_halves_of_heads_are_rotated_as_complex_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(7, 4, generator=generator, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 6, 0, 1]])
    x = torch.randn(6, 3, 8, generator=generator, dtype=torch.float64).requires_grad_()
    rotation = Rotation.of(angles.repeat(1, 2)[:, None, None], positions, 1.5)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.full_like(angles, 1.5), angles)[positions[0], None]
    torch.testing.assert_close(rotation.apply(x), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-14)
    torch.autograd.gradcheck(rotation.apply, x)


def test_rotations_in_float32_and_bfloat16_differ_by_rounding_from_megatrons() -> None:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    angles = torch.rand(6, 1, 1, 4).repeat(1, 1, 1, 2)
    x = torch.randn(6, 3, 8)
    for dtype, tolerance in ((torch.float32, 5e-7), (torch.bfloat16, 4e-2)):
        rotation = Rotation.of(angles, torch.arange(6)[None], 1.0)
        theirs = _apply_rotary_pos_emb_bshd(x.to(dtype)[:, None], angles).squeeze(1)
        torch.testing.assert_close(rotation.apply(x.to(dtype)), theirs, rtol=0, atol=tolerance)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FAMILIES = CASES | {"plain": QWEN, "llama3": QWEN | {"rope_parameters": {"rope_type": "llama3", **LLAMA3}}}


@pytest.mark.parametrize("entries", FAMILIES.values(), ids=FAMILIES)
def test_a_bfloat16_query_is_rotated_exactly_and_rounded_once(entries: dict[str, Any]) -> None:
    """As SGLang's kernel does on GPUs. Tables or products in bfloat16 make the error 1.4 times as large."""
    spec = tiny_spec("qwen2", num_hidden_layers=1, **entries)
    (model,) = build_chunks(spec, transformer_config(spec, Parallel(), torch.bfloat16, False), 1.0, torch.device("cpu"))
    positions = torch.linspace(0, spec.max_positions - 1, 500).long()[None]
    x = torch.randn(positions.numel(), 2, spec.head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    x.requires_grad_()
    rotation = model._rotation(positions, spec.max_positions)
    assert (rotation.cos.dtype, rotation.sin.dtype) == (torch.float32, torch.float32)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.complex(rotation.cos.double(), rotation.sin.double())
    exact = torch.cat([turned.real, turned.imag], -1)
    rotated = rotation.apply(x)
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.double(), exact, rtol=2**-8, atol=1e-6)
    (back,) = torch.autograd.grad(rotated, x, rotated)
    assert back.dtype == torch.bfloat16
    factor = float((rotation.cos**2 + rotation.sin**2).mean())  # YaRN's, squared
    torch.testing.assert_close(back.double(), factor * x.double(), rtol=0, atol=factor * 2**-7 * float(x.abs().max()))
