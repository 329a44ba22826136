"""Lets unmodified megatron-core run on a host without CUDA (CPU tensors, gloo groups).

`install()` does nothing if CUDA is available. Otherwise it hooks the import of `megatron.core.*` only, so that these
modules use the device "cpu":

1. In their compiled code the string constants "cuda" and "torch.cuda.FloatTensor" (Half, BFloat16) become "cpu" and
   "torch.FloatTensor": device arguments, and the type checks of optimizers and gradient clipping.
2. Their global `torch` becomes a view whose `torch.cuda` answers for the CPU: the device, the random generator, inert
   streams and events; tensor factories ignore pin_memory, which needs an accelerator.
3. `jit_fuser` (torch.compile) does nothing: compiling costs more than it saves on small CPU models.
4. The random-state tracker forks the CPU generator.
5. MoE split sizes become numpy for CPU tensors too; mcore converts them only `if tensor.is_cuda`.
6. In tensor_parallel.mappings, gathers and reduce-scatters of one tensor per rank take tensors of different lengths,
   as NCCL's do and gloo's do not: expert tensor parallelism needs them.
7. `Tensor.cuda()` returns the tensor itself: the one change outside megatron.core, of a call that could only raise.

No arithmetic is replaced. Written for megatron-core 0.16.1.
"""

import contextlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = "megatron.core"
_CPU = torch.device("cpu")
_RENAMED = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
_PINNABLE_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "empty_like")


class _Inert:
    """An inert stream or event: work on a CPU is ordered anyway."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, *_: Any) -> "_Inert":
        return self

    record_event = record

    def synchronize(self, *_: Any) -> None:
        pass

    wait = wait_stream = wait_event = synchronize

    def query(self) -> bool:
        return True


class _View(ModuleType):
    """A module's attributes, some of them overridden."""

    def __init__(self, real: ModuleType, **overrides: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(overrides, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _unpinned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return factory(*args, **kwargs)

    return make


def _cpu_torch() -> ModuleType:
    """Make the `torch` that megatron.core gets on this host."""
    cuda = _View(
        torch.cuda,
        current_device=lambda: _CPU,
        device_count=lambda: 1,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        manual_seed=torch.manual_seed,
        Stream=_Inert,
        Event=_Inert,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=_Inert,
        default_stream=_Inert,
        is_current_stream_capturing=lambda: False,
    )
    return _View(torch, cuda=cuda, **{name: _unpinned(getattr(torch, name)) for name in _PINNABLE_FACTORIES})


def _renamed(constant: Any) -> Any:
    """Replace the device names in a constant of compiled code, also in nested code."""
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(_renamed(c) for c in constant.co_consts))
    if isinstance(constant, tuple):
        return tuple(_renamed(c) for c in constant)
    return _RENAMED.get(constant, constant) if isinstance(constant, str) else constant


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _all_gather(outputs: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather tensors, of different lengths too, which gloo does not support: they are padded to the longest."""
    longest = max(output.shape[0] for output in outputs)
    padded = [output.new_zeros((longest, *output.shape[1:])) for output in outputs]
    padded[group.rank()][: mine.shape[0]] = mine
    dist.all_gather(padded, padded[group.rank()].clone(), group=group)
    for output, received in zip(outputs, padded, strict=True):
        output.copy_(received[: output.shape[0]])


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Reduce and scatter tensors, of different lengths too."""
    whole = torch.cat(inputs)
    dist.all_reduce(whole, group=group)
    output.copy_(whole.split([part.shape[0] for part in inputs])[group.rank()])


def _adjust(module: ModuleType, cpu_torch: ModuleType) -> None:
    """Replace parts of a module after it has been executed."""
    names: Any = module
    if hasattr(module, "torch"):
        names.torch = cpu_torch
    if module.__name__ == f"{PACKAGE}.jit":
        names.jit_fuser = lambda function: function
    elif module.__name__ == f"{PACKAGE}.tensor_parallel.random":
        names._get_cuda_rng_state, names._set_cuda_rng_state = _get_rng_state, _set_rng_state
        # fork() warns when the CPU generator moved inside it; here that is the generator that it forks
        logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    elif module.__name__ == f"{PACKAGE}.transformer.moe.moe_utils":
        names.maybe_move_tensor_to_cpu = _to_numpy
    elif module.__name__ == f"{PACKAGE}.tensor_parallel.mappings":
        # these two calls, of one tensor per rank, are the ones for experts' unequal shares of tokens
        collectives = _View(dist, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
        names.torch = _View(cpu_torch, distributed=collectives)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, cpu_torch: ModuleType) -> None:
        super().__init__(fullname, path)
        self._cpu_torch = cpu_torch

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType | None = _renamed(super().get_code(fullname))
        return code

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _adjust(module, self._cpu_torch)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._cpu_torch = _cpu_torch()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._cpu_torch)
        return spec


def install() -> bool:
    """Prepare megatron.core for this host; idempotent.

    Returns: True if megatron.core now runs on the CPU; False if CUDA is available, and nothing was changed.
    Raises: RuntimeError: megatron.core was imported before.
    """
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if PACKAGE in sys.modules:
        raise RuntimeError(f"{PACKAGE} was imported before trainer_service.megatron_engine; import the engine first")
    torch.Tensor.cuda = lambda self, *_, **__: self
    sys.meta_path.insert(0, _Finder())
    return True
