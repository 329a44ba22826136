"""Functions on whole tensors: their bytes, checksums for comparing two engines, the NaN fill that proves coverage."""

import ctypes
from collections.abc import Mapping

import torch
import xxhash

from servicekit.errors import ConfigError

WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes, _memory_at.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on a CPU; keep the tensor as long as they are used.

    As `.numpy().data`, which however fixes the size of the tensor's storage for good: parameters that a trainer
    offloads (trainer.offload) must be resizable.
    """
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor on a CPU has bytes in a row")
    found: memoryview = _memory_at(tensor.data_ptr(), size, _WRITABLE) if size > 0 else memoryview(b"")
    return found.cast("B")


def tensor_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """ "dtype:shape:xxh3-128" by name; equal strings mean bitwise equal tensors."""
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def _checksum(tensor: torch.Tensor) -> str:
    held = tensor.detach().contiguous().cpu()
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}:{shape}:{xxhash.xxh3_128(memory_of(held)).hexdigest()}"


def poison_tensors(tensors: Mapping[str, torch.Tensor]) -> int:
    """Fill tensors with what no checkpoint holds: NaN, or the largest integer. Returns: the number of tensors."""
    for tensor in tensors.values():
        tensor.detach().fill_(_foreign(tensor.dtype))
    return len(tensors)


def _foreign(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def wire_dtype(asked: str, held: torch.dtype) -> torch.dtype:
    """Return the type that the weights travel in.

    Args:
        asked: name of the type that the round asks for; "" for none.
        held: type of the parameters, used where the round asks for none.
    Raises: ConfigError: weights cannot travel in a type of this name.
    """
    if asked == "":
        return held
    if asked not in WIRE_DTYPES:
        raise ConfigError(f"wire type {asked} is not known; use one of {', '.join(WIRE_DTYPES)}")
    return WIRE_DTYPES[asked]
