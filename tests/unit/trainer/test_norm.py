"""RMSNorm on a CPU: its values and gradients, with those of torch's operator beside them."""

import pytest
import torch
from torch.nn.functional import rms_norm

from tests.kit.stores import tiny_spec
from trainer_service.megatron_engine.build import transformer_config
from trainer_service.megatron_engine.layer_spec import TorchRMSNorm
from weightsync.layouts.layout import Parallel

EPS = 1e-2  # large enough to show


def norm_of(dtype: torch.dtype, size: int) -> TorchRMSNorm:
    config = transformer_config(tiny_spec("qwen3"), Parallel(), dtype, False)
    made = TorchRMSNorm(config, size, eps=EPS)
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize("shape", [(5, 1, 8), (3, 2, 4, 6), (0, 1, 8)])
def test_it_is_torch_s_norm_with_its_gradients(shape: tuple[int, ...]) -> None:
    module = norm_of(torch.float64, shape[-1])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    factor = torch.randn(shape, generator=generator, dtype=torch.float64)
    outs = module(x), rms_norm(x, shape[-1:], module.weight, EPS)
    torch.testing.assert_close(*outs, rtol=0, atol=1e-14)
    grads = [torch.autograd.grad((out * factor).sum(), (x, module.weight)) for out in outs]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_a_transposed_input_is_normalised_too() -> None:
    module = norm_of(torch.float32, 6)
    x = torch.randn(4, 6, 3).transpose(1, 2)
    torch.testing.assert_close(module(x), rms_norm(x, (6,), module.weight, EPS), rtol=0, atol=1e-6)


def test_bfloat16_is_torch_s_own() -> None:
    module, x = norm_of(torch.bfloat16, 8), torch.randn(5, 8, dtype=torch.bfloat16)
    assert torch.equal(module(x), rms_norm(x, (8,), module.weight, EPS))
