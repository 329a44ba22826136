"""Rotary embeddings of a packed row: cosines and sines once per micro-batch, applied to queries and keys in each layer.

mcore computes them from angles in every layer, twice, and for packed rows cuts the row into its sequences each time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """By how much the two halves of each head are rotated, at each of the T tokens of this rank."""

    cos: Tensor  # [T, 1, head_dim]
    sin: Tensor  # [T, 1, head_dim / 2]

    @classmethod
    def of(cls, angles: Tensor, positions: Tensor, factor: float, dtype: torch.dtype) -> "Rotation":
        """Look the tokens' rotations up.

        Args:
            angles: [positions, 1, 1, head_dim] float32, by position in a sequence; mcore has them twice in a row.
            positions: [1, T] of each token in its sequence.
            factor: of cosines and sines, which YaRN has.
            dtype: of queries and keys.
        """
        table = angles[:, 0, 0]
        cos = (table.cos() * factor).to(dtype)
        sin = (table[:, : table.shape[-1] // 2].sin() * factor).to(dtype)
        return cls(cos=cos[positions[0]][:, None], sin=sin[positions[0]][:, None])

    def apply(self, x: Tensor) -> Tensor:
        """Rotate queries or keys [T, heads, head_dim]."""
        rotated: Tensor = _Rotate.apply(x, self.cos, self.sin)
        return rotated


class _Rotate(Function):
    """(a, b) -> (a cos - b sin, b cos + a sin); the gradient is rotated back. A third of autograd's passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = x * cos
    first, second = x.chunk(2, -1)
    rotated_first, rotated_second = out.chunk(2, -1)
    rotated_first.addcmul_(second, sin, value=-sign)
    rotated_second.addcmul_(first, sin, value=sign)
    return out
