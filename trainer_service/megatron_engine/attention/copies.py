"""Copies of keys and values that the backward pass makes again instead of holding them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

# What is held of a copy: the row, which of its tokens, and how the saved tensor lies in the copy.
_Held = tuple[Tensor, Tensor, torch.Size, tuple[int, ...], int]


def with_copies(
    key: Tensor,
    value: Tensor,
    indices: Sequence[Tensor],
    attend: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
) -> Tensor:
    """Attend to copies of a row's keys and values.

    Completions that share a prompt attend to a copy of it each, and a context-parallel rank's chunks to one of what is
    before them. Held in every layer until the backward pass, these would be as many tokens as there are without
    sharing, and more; so autograd holds the row, and only one layer has copies.

    Args:
        key: [T, groups, head_dim]
        value: the same.
        indices: [K] each: which tokens a copy is of; any of them several times.
        attend: computes attention from the copies, [K, groups, head_dim] each, of keys and of values.
    """
    copies = [_Copies.apply(row, *indices) for row in (key, value)]
    rows = {
        copy.untyped_storage()._cdata: (row.detach(), index)  # fake tensors have no address of data
        for row, made in zip((key, value), copies, strict=True)
        for copy, index in zip(made, indices, strict=True)
    }

    def hold(saved: Tensor) -> Tensor | _Held:
        copied = rows.get(saved.untyped_storage()._cdata)
        return saved if copied is None else (*copied, saved.size(), saved.stride(), saved.storage_offset())

    def give(held: Tensor | _Held) -> Tensor:
        if isinstance(held, Tensor):
            return held
        row, index, *place = held
        return row.index_select(0, index).as_strided(*place)

    with saved_tensors_hooks(hold, give):
        return attend(copies[0], copies[1])


class _Copies(Function):
    """Tokens of a row, several times; all of their gradients are added up in one tensor of the row's size."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, *indices: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*indices)
        ctx.shape = row.shape
        return tuple(row.index_select(0, index) for index in indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].new_zeros(ctx.shape)
        for index, grad in zip(ctx.saved_tensors, grads, strict=True):
            total.index_add_(0, index, grad)
        return (total, *(None for _ in grads))
