"""Functions on whole tensors: checksums for comparing two engines, and the NaN fill that proves coverage."""

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
