"""Rotary embeddings of a packed row: cosines and sines once per micro-batch, applied to queries and keys in each layer.

mcore computes them from angles in every layer, twice, and for packed rows cuts the row into its sequences each time.
Tables and products are float32 and the result is rounded once, as SGLang does it on GPUs: with tables in bfloat16 a
rotated query would be 1.4 times as far from the exact one, and so would every score.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """By how much the two halves of each head are rotated, at each of the T tokens of this rank."""

    cos: Tensor  # [T, 1, head_dim / 2] float32, whatever the type of queries and keys
    sin: Tensor

    @classmethod
    def of(cls, angles: Tensor, positions: Tensor, factor: float) -> "Rotation":
        """Look the tokens' rotations up.

        Args:
            angles: [positions, 1, 1, head_dim] float32, by position in a sequence; mcore has them twice in a row.
            positions: [1, T] of each token in its sequence.
            factor: of cosines and sines, which YaRN has.
        """
        table = angles[:, 0, 0, : angles.shape[-1] // 2]
        cos, sin = table.cos() * factor, table.sin() * factor
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
    """Rotate [T, heads, head_dim] in the tables' type; besides the result, half of it exists in that type at a time."""
    out = torch.empty_like(x)
    first, second = x.chunk(2, -1)
    rotated_first, rotated_second = out.chunk(2, -1)
    torch.addcmul(first * cos, second, sin, value=-sign, out=rotated_first)
    torch.addcmul(second * cos, first, sin, value=sign, out=rotated_second)
    return out
