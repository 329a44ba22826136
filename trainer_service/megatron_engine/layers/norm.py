"""RMSNorm for mcore's layers; torch only."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd import Function

# In which CPUs compute as the inputs are; for others, and on GPUs, torch's own operator is better.
_COMPOSED = (torch.float32, torch.float64)


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight's gradient mcore sums over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if x.device.type != "cpu" or x.dtype not in _COMPOSED:
            return super().forward(x)
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out


class _RMSNorm(Function):
    """y = w x / rms(x) in half the passes over memory that torch makes on a CPU, where no kernel of its own exists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, scale = ctx.saved_tensors
        products = (grad * normed).flatten(0, -2)
        # the part of the gradient along x, which normalising takes away
        along = torch.mv(products, weight).div_(normed.shape[-1]).view_as(scale)
        return (grad * weight).addcmul_(normed, along, value=-1).mul_(scale), products.sum(0), None
