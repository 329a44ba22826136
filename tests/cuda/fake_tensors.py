"""Tensors on CUDA devices that are not there: torch follows their shapes, types and devices, and computes nothing.

An operation that mixes devices, which a real GPU would refuse, raises here too; one that a GPU lets pass (a CPU scalar
beside a CUDA tensor, a copy from one device to another) is in `operations`.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Operation:
    """One operation: its name, the devices of the tensors that it was given and made, and who asked for a mix."""

    name: str
    devices: tuple[str, ...]
    made: tuple[str, ...] = ()
    where: str = ""
    numbers: int = 0  # of the tensors that it was given, those of the CPU without dimensions
    waits: bool = False  # the host would go on only when the device has done all that came before

    @property
    def mixes(self) -> bool:
        return len(set(self.devices)) > 1

    @property
    def beside_numbers(self) -> bool:
        """Nothing but numbers of the CPU makes it a mix."""
        return self.devices.count("cpu") == self.numbers and len({*self.devices} - {"cpu"}) == 1


@dataclass
class Recorded:
    operations: list[Operation] = field(default_factory=list)

    def mixed(self) -> list[Operation]:
        """Operations on tensors of several devices."""
        return [each for each in self.operations if each.mixes]

    def on(self, device: str) -> int:
        """How many operations were given, or made, a tensor of this device."""
        return sum(device in each.devices + each.made for each in self.operations)


class _CudaIsFake(TorchDispatchMode):
    def __init__(self, recorded: Recorded, read_as: float | None) -> None:
        super().__init__()
        self._recorded = recorded
        self._read_as = read_as
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("pin_memory"):  # which takes a driver
            with self._fake:
                return func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        devices = {each.type for each in leaves if isinstance(each, torch.device)}
        if "cuda" not in devices and not any(isinstance(each, FakeTensor) for each in leaves):
            return func(*args, **(kwargs or {}))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        given = tuple(str(each.device) for each in tensors)
        numbers = sum(each.dim() == 0 and each.device.type == "cpu" for each in tensors)
        try:
            out = self._run(func, args, kwargs or {})
        except RuntimeError:
            self._recorded.operations.append(Operation(str(func), given, (), _where(), numbers))
            raise
        made = tuple(str(each.device) for each in pytree.tree_leaves(out) if isinstance(each, torch.Tensor))
        devices_met, waits = {*given, *made}, _waits(func, tensors, made, kwargs or {}, args)
        where = _where() if len(devices_met) > 1 or waits else ""
        self._recorded.operations.append(Operation(str(func), given, made, where, numbers, waits))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            with self._fake:
                if func is torch.ops.aten._to_copy.default and not isinstance(args[0], FakeTensor):
                    # torch would really copy it
                    kind = kwargs.get("dtype") or args[0].dtype
                    return torch.empty(args[0].shape, dtype=kind, device=kwargs["device"])
                if func is torch.ops.c10d.allreduce_coalesced_.default:
                    # torch has a fake of the plain one only
                    tensors, group, kind, *rest = args
                    return torch.ops.c10d.allreduce_(tensors, group, kind, None, *rest)[1]
                if func is torch.ops.aten.masked_select.default and self._read_as == 0:
                    return args[0].new_empty(0)
                out = func(*args, **kwargs)
        except DataDependentOutputException:
            if self._read_as is None or func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return torch.tensor(self._read_as, dtype=args[0].dtype).item()
        for each in pytree.tree_leaves(out):
            if isinstance(each, FakeTensor):
                each.constant = None  # torch would compute with it, on the device
        return out


# What is read of a device, or decides a result's shape.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal")


def _waits(func: Any, tensors: list[torch.Tensor], made: tuple[str, ...], kwargs: dict[str, Any], args: Any) -> bool:
    """Whether the host would wait: for a number, a shape, or a copy between host and device."""
    name = func.overloadpacket.__name__
    devices = [each.device.type for each in tensors]
    if name in ("_to_copy", "copy_"):
        left = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        return len({*devices, *(each.split(":")[0] for each in made)}) > 1 and not left
    if name in ("index", "index_put_", "index_put"):
        fills = name != "index" and args[2].numel() == 1 and args[2].device.type == "cpu"  # torch fills by the mask
        return "cuda" in devices and tensors[1].dtype == torch.bool and not fills
    return name in _READS and "cuda" in devices


def _where() -> str:
    """The innermost line of the program that led here."""
    lines = [each for each in traceback.extract_stack() if not each.filename.startswith(_HERE)]
    ours = [each for each in lines if "/torch/" not in each.filename]
    return f"{'/'.join(Path(ours[-1].filename).parts[-2:])}:{ours[-1].lineno}" if ours else ""


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch, read_as: float | None = None) -> Iterator[Recorded]:
    """Within the block every tensor on a CUDA device is a fake one.

    read_as: what a number that is read from one (`float(tensor)`) is, and with 0 no mask chooses anything; None: such
        a read raises.
    """
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    torch._C._ensureCUDADeviceGuardSet()
    only_cpu = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(1, device="cuda") is made on the CPU, then moved
    recorded = Recorded()
    try:
        with _CudaIsFake(recorded, read_as):
            yield recorded
    finally:
        torch._C._set_only_lift_cpu_tensors(only_cpu)
