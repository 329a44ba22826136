"""Counts the bytes that tensors hold."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Within the block: bytes of the storages that operations make, while they live, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def total(self) -> int:
        """Bytes of the storages that live."""
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        before = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for made in pytree.tree_leaves(out):
            if isinstance(made, torch.Tensor) and (storage := made.untyped_storage())._cdata not in before:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.total())
        return out
