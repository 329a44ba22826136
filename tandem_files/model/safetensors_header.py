"""Reads and checks the header of a safetensors file without loading a tensor; needs no torch.

Format: 8 bytes little-endian header length, the JSON header {name: {dtype, shape, data_offsets}}, then the data. The
offsets are relative to the data's start and cover it without gaps, so that the header tells the file's exact size.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
# Types that a model can be trained from. Quantized types need scales, which are tensors of their own.
TRAINABLE = ("F32", "BF16", "F16")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class DamagedFile(ValueError):
    """The file is not a complete safetensors file; the message gives the reason, without the file's name."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor of the file, at its bytes from `begin` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the tensors of a file, by name.

    Raises: DamagedFile: it is truncated, too long, or not a safetensors file; OSError.
    """
    with path.open("rb") as file:
        return parse_header(file, path.stat().st_size)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts that were written along with a file's tensors. Raises: OSError, ValueError."""
    with path.open("rb") as file:
        header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)))
    return dict(header.get("__metadata__", {}))


def parse_header(file: BinaryIO, size: int) -> dict[str, TensorInfo]:
    """Read the tensors of an open file, from its start, by name. size: bytes of the file. Raises: DamagedFile."""
    header_bytes = int.from_bytes(file.read(8), "little") if size >= 8 else 0
    if not 2 <= header_bytes <= _MAX_HEADER_BYTES:
        raise DamagedFile(f"is not a safetensors file ({size} bytes, no valid header length)")
    if size < 8 + header_bytes:
        raise DamagedFile(f"is truncated: the header alone needs {8 + header_bytes} bytes, the file has {size}")
    try:
        header = json.loads(file.read(header_bytes))
    except ValueError as error:
        raise DamagedFile("is corrupt: its header is not JSON") from error
    return _check(header, data_at=8 + header_bytes, size=size)


def _check(header: Any, *, data_at: int, size: int) -> dict[str, TensorInfo]:
    if not isinstance(header, dict):
        raise DamagedFile("is corrupt: its header is not a JSON object")
    tensors = {name: _entry(name, entry, data_at) for name, entry in header.items() if name != "__metadata__"}
    spans = [(tensor.begin - data_at, tensor.end - data_at, name) for name, tensor in tensors.items()]
    data_bytes, expected = size - data_at, max((end for _, end, _ in spans), default=0)
    if data_bytes < expected:
        raise DamagedFile(f"is truncated: {size} bytes, but its header describes {size - data_bytes + expected}")
    if data_bytes > expected:
        raise DamagedFile(f"is corrupt: {data_bytes - expected} bytes more than its header describes")
    cursor = 0
    for start, end, name in sorted(spans):
        if start != cursor:
            raise DamagedFile(f"is corrupt: tensor {name} starts at byte {start} of the data, expected {cursor}")
        cursor = end
    return tensors


def _entry(name: str, entry: Any, data_at: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(length) for length in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"is corrupt: the header entry of tensor {name} is malformed") from error
    if dtype in _ITEM_BYTES and end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise DamagedFile(f"is corrupt: tensor {name} of {dtype} {list(shape)} has {end - start} bytes")
    return TensorInfo(dtype=dtype, shape=shape, begin=data_at + start, end=data_at + end)
