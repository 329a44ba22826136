"""Arrays in messages: as little-endian bytes, or as the repeated field of the release before.

Reading 2,048 ids and log-probs takes 2 us as bytes, 135 as repeated fields. `token_ids_u32` is what `token_ids` was.
"""

from array import array
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from servicekit.errors import InvalidRequest

# By the end of the field's name: the type of the items as `array` names it, and their bytes.
_TYPES = {"u32": ("I", 4), "f32": ("f", 4), "u8": ("B", 1)}
KINDS = tuple(f"_{kind}" for kind in _TYPES)


def packed(field: str, values: Iterable[Any]) -> bytes:
    """Make the bytes of a field, whose name ends with the type of its items."""
    kind, _ = _TYPES[field.rpartition("_")[2]]
    return (values if isinstance(values, array) and values.typecode == kind else array(kind, values)).tobytes()


def array_length(message: Message, field: str) -> int:
    """Return the number of items of a field of bytes, or else of the repeated field that it replaces.

    Raises: InvalidRequest: both are set, or the bytes are no whole number of items.
    """
    repeated, _, kind = field.rpartition("_")
    data, items = getattr(message, field), getattr(message, repeated)
    if not data:
        return len(items)
    if items:
        raise InvalidRequest(f"{repeated} and {field} are both set; send {field} alone")
    if len(data) % _TYPES[kind][1]:
        raise InvalidRequest(f"{field} has {len(data)} bytes, which is no multiple of {_TYPES[kind][1]}")
    return len(data) // _TYPES[kind][1]


def read_array(message: Message, field: str) -> "array[Any]":
    """Read the items of a field of bytes, or else of the repeated field that it replaces. Raises: as array_length."""
    array_length(message, field)
    repeated, _, kind = field.rpartition("_")
    # A slice of a repeated field is a list, from which an array is made twice as fast as from the field.
    return array(_TYPES[kind][0], getattr(message, field) or getattr(message, repeated)[:])
