"""Whole-tensor tools: checksums that two engines can be compared by, and the NaN fill that proves coverage."""

from collections.abc import Mapping

import torch
import xxhash

from servicekit.errors import ConfigError

WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def tensor_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """ "dtype:shape:xxh3-128" by name; equal strings mean bitwise equal tensors."""
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def _checksum(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}:{shape}:{xxhash.xxh3_128(raw).hexdigest()}"


def poison_tensors(tensors: Mapping[str, torch.Tensor]) -> int:
    """Fills them with what no checkpoint holds: NaN, or the largest whole number. Returns: their number."""
    for tensor in tensors.values():
        tensor.detach().fill_(_foreign(tensor.dtype))
    return len(tensors)


def _foreign(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def wire_dtype(asked: str, held: torch.dtype) -> torch.dtype:
    """The type that a round asks for by name; what is held where it asks for none.

    Raises: ConfigError: weights do not travel in a type of this name.
    """
    if asked == "":
        return held
    if asked not in WIRE_DTYPES:
        raise ConfigError(f"no wire type {asked}; there are {', '.join(WIRE_DTYPES)}")
    return WIRE_DTYPES[asked]
