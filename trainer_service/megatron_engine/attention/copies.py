"""Copies of keys and values that the backward pass makes again instead of holding them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# What is held of a copy: the row, and how the saved tensor lies in the copy.
_Held = tuple[Tensor, torch.Size, tuple[int, ...], int]


def with_copies(key: Tensor, value: Tensor, index: Tensor, attend: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Attend to copies of a row's keys and values.

    Completions that share a prompt attend to a copy of it each. Held in every layer until the backward pass, these
    would be as many tokens as there are without sharing; so autograd holds the row, and only one layer has copies.

    Args:
        key: [T, groups, head_dim]
        value: the same.
        index: [K] which tokens to copy; any of them several times.
        attend: computes attention from the copies, [K, groups, head_dim] each.
    """
    copies = [(row.index_select(0, index), row.detach()) for row in (key, value)]
    rows = {copy.untyped_storage().data_ptr(): row for copy, row in copies}

    def hold(saved: Tensor) -> Tensor | _Held:
        row = rows.get(saved.untyped_storage().data_ptr())
        return saved if row is None else (row, saved.size(), saved.stride(), saved.storage_offset())

    def give(held: Tensor | _Held) -> Tensor:
        if isinstance(held, Tensor):
            return held
        row, *place = held
        return row.index_select(0, index).as_strided(*place)

    with saved_tensors_hooks(hold, give):
        return attend(copies[0][0], copies[1][0])
