"""Tensors on CUDA devices that are not there: torch follows their shapes, types and devices, and computes nothing.

An operation that mixes devices, which a real GPU would refuse, raises here too; one that a GPU lets pass (a CPU scalar
beside a CUDA tensor, a copy from one device to another) is in `operations`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Operation:
    """One operation: its name and the devices of the tensors that it was given."""

    name: str
    devices: tuple[str, ...]

    @property
    def mixes(self) -> bool:
        return len(set(self.devices)) > 1


@dataclass
class Recorded:
    operations: list[Operation] = field(default_factory=list)

    def mixed(self) -> list[Operation]:
        """Operations on tensors of several devices."""
        return [each for each in self.operations if each.mixes]

    def on(self, device: str) -> int:
        """How many operations had a tensor of this device."""
        return sum(device in each.devices for each in self.operations)


class _CudaIsFake(TorchDispatchMode):
    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        devices = {each.type for each in leaves if isinstance(each, torch.device)}
        if "cuda" not in devices and not any(isinstance(each, FakeTensor) for each in leaves):
            return func(*args, **(kwargs or {}))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        self._recorded.operations.append(Operation(str(func), tuple(str(each.device) for each in tensors)))
        with self._fake:
            return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Within the block every tensor on a CUDA device is a fake one."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    torch._C._ensureCUDADeviceGuardSet()
    recorded = Recorded()
    with _CudaIsFake(recorded):
        yield recorded
