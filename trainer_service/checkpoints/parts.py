"""A part of a tensor that a rank holds of a whole one: AdamW's state under the distributed optimizer (ZeRO-1).

The distributed optimizer divides flat buffers, so that a part may begin and end in the middle of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatPart:
    """Elements `start` to `start + len(values)` of a tensor of `shape`, flattened.

    Attributes:
        values: [n] the live elements; [0]: this rank holds nothing of it.
    """

    shape: tuple[int, ...]
    start: int
    values: Tensor

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of the tensor as a matrix that hold one of the elements: the first, and the one after the last."""
        end = self.start + self.values.numel()
        return (self.start // self.columns, -(-end // self.columns)) if self.values.numel() > 0 else (0, 0)

    @property
    def columns(self) -> int:
        """The columns of the tensor as a matrix; a vector is one column."""
        return self.shape[1] if len(self.shape) > 1 else 1

    def take(self, rows: Tensor) -> None:
        """Copy the elements from the matrix of `rows`, [last - first, columns]."""
        begin = self.start - self.rows[0] * self.columns
        self.values.copy_(rows.flatten()[begin : begin + self.values.numel()])


# What a rank holds of a tensor of a checkpoint.
Held: TypeAlias = Tensor | FlatPart


def shapes_of(held: Mapping[str, Held]) -> dict[str, Tensor]:
    """Return a tensor without memory for each, of the whole one's shape and type."""
    return {name: shape_of(one) for name, one in held.items()}


def shape_of(held: Held) -> Tensor:
    """Return a tensor without memory of the whole one's shape and type."""
    return torch.empty(held.shape, dtype=values_of(held).dtype, device="meta")


def values_of(held: Held) -> Tensor:
    """Return the live elements."""
    return held.values if isinstance(held, FlatPart) else held
