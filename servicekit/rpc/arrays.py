"""Arrays in messages: as little-endian bytes, or as the repeated field of the release before.

Reading 2,048 ids and log-probs takes 2 us as bytes, 135 as repeated fields. `token_ids_u32` is what `token_ids` was.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from servicekit.errors import InvalidRequest

# By the last letters of the field's name: the type of the items as `array` names it, and their bytes.
_TYPES = {"u32": ("I", 4), "f32": ("f", 4), "_u8": ("B", 1)}
KINDS = tuple(_TYPES)


def packed(field: str, values: Iterable[Any]) -> bytes:
    """Make the bytes of a field, whose name ends with the type of its items."""
    kind, _ = _TYPES[field[-3:]]
    return (values if isinstance(values, array) and values.typecode == kind else array(kind, values)).tobytes()


def array_of(field: str, data: bytes, items: Sequence[Any]) -> "array[Any]":
    """Make an array of what a field of bytes holds, or else of the repeated field that it replaces.

    Raises: InvalidRequest: both are set, or the bytes are no whole number of items.
    """
    kind, size = _TYPES[field[-3:]]
    if not data:
        # A slice of a repeated field is a list, from which an array is made twice as fast as from the field.
        return array(kind, items[:])
    if items:
        raise InvalidRequest(f"{field.rpartition('_')[0]} and {field} are both set; send {field} alone")
    try:
        return array(kind, data)
    except ValueError:
        raise InvalidRequest(f"{field} has {len(data)} bytes, which is no multiple of {size}") from None


def read_array(message: Message, field: str) -> "array[Any]":
    """Read a field of bytes, or else the repeated field that it replaces. Raises: as array_of."""
    return array_of(field, getattr(message, field), getattr(message, field.rpartition("_")[0]))


def array_length(message: Message, field: str) -> int:
    """Return the number of items of a field of bytes, or else of the repeated field. Raises: as array_of."""
    data, items = getattr(message, field), getattr(message, field.rpartition("_")[0])
    size = _TYPES[field[-3:]][1]
    if items or len(data) % size:
        return len(array_of(field, data, items))
    return len(data) // size
