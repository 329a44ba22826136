"""Bounds of the fields of a request, and the check of a whole message against a table of bounds.

A bad request is refused, with field and value, before a handler gets it: no deadline without end, no list that fills
the memory, no name that leads out of a folder. What depends on more than the request (a vocabulary, a state) is checked
where that is known.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from servicekit.errors import InvalidRequest

# Most fields of a request, those of its parts included: what the longest lists of the table need. An empty part takes
# two bytes on the wire and a hundred in memory: 64 MiB of them would take 4 GiB before any check of their number.
MOST_FIELDS = 2**18 + 2**10
# Bytes of a request that no field of ours needs (of a newer release, or twice the same) are kept with it: at most as
# many again, and these.
_PADDING_BYTES = 2**16
_SHOWN_CHARS = 80


@dataclass(frozen=True, kw_only=True)
class Number:
    """A finite number from `low` to `high`; with `or_zero` also 0, which means "not set"."""

    low: float
    high: float
    or_zero: bool = False

    def problem(self, value: float) -> str:
        """Check a value. Returns: what is wrong with it; "": nothing."""
        if self.low <= value <= self.high or (self.or_zero and value == 0):  # no comparison holds for NaN
            return ""
        return f"must be {'0, or ' if self.or_zero else ''}from {self.low:.15g} to {self.high:.15g}"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A string of at most `longest` characters that matches the whole `pattern`; by default without control codes."""

    longest: int
    pattern: str = r"[^\x00-\x1f]*"

    def problem(self, value: str) -> str:
        """Check a value, as Number.problem."""
        if len(value) > self.longest:
            return f"has {len(value)} characters, must have at most {self.longest}"
        return "" if re.fullmatch(self.pattern, value) else f"must match {self.pattern}"


class Flag:
    """True or false."""

    def problem(self, value: bool) -> str:
        """Check a value, as Number.problem."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A declared value of an enum with this many values; 0 is allowed, a handler may refuse it."""

    last: int

    def problem(self, value: int) -> str:
        """Check a value, as Number.problem."""
        return "" if 0 <= value <= self.last else f"must be a declared value, 0 to {self.last}"


@dataclass(frozen=True, kw_only=True)
class SubMessage:
    """A message with a table of its own; `required`: it must be set."""

    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Items:
    """At most `most` items within `each`; None: the handler checks them in a thread, as they may be millions."""

    most: int
    each: "Number | Text | Choice | SubMessage | None"


Bound = Number | Text | Flag | Choice | SubMessage | Items
# By full name of the message, then by field.
Table = Mapping[str, Mapping[str, Bound]]
# What must hold for fields together. Returns: what is wrong, "" if nothing is.
Rules = Mapping[str, Callable[[Any], str]]


def read_message(kind: type[Message], data: bytes) -> Message:
    """Parse a request whose memory is in proportion to its bytes, and its bytes to its fields.

    Raises: InvalidRequest: it is not; DecodeError: it is no message of this kind.
    """
    # The C++ descriptors have the same attributes.
    if _count_fields(data, cast(Descriptor, kind.DESCRIPTOR)) > MOST_FIELDS:
        raise InvalidRequest(f"{kind.DESCRIPTOR.name} has more than {MOST_FIELDS} fields, those of its parts included")
    message = kind.FromString(data)
    message.DiscardUnknownFields()
    needed = message.ByteSize()
    if len(data) > 2 * needed + _PADDING_BYTES:
        raise InvalidRequest(f"{kind.DESCRIPTOR.name} has {len(data)} bytes; its fields need {needed}")
    return message


def _count_fields(data: bytes, kind: Descriptor) -> int:
    """Count the fields of a serialised message and its parts, at most MOST_FIELDS + 1, or to a byte that is wrong."""
    count, parts = 0, [(0, len(data), _parts_of(kind))]
    try:
        while parts:
            at, end, inner = parts.pop()
            while at < end and count <= MOST_FIELDS:
                count += 1
                tag, at = _varint(data, at)
                if tag & 7 == 2:
                    length, at = _varint(data, at)
                    if length and tag >> 3 in inner:
                        parts.append((at, min(at + length, end), _parts_of(inner[tag >> 3])))
                    at += length
                else:
                    at = _varint(data, at)[1] if tag & 7 == 0 else at + _FIXED[tag & 7]
    except (IndexError, KeyError, ValueError):  # the parser says what is wrong
        pass
    return count


@functools.cache
def _parts_of(kind: Descriptor) -> dict[int, Descriptor]:
    """Return the fields of a message that are messages themselves, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


# Bytes by wire type, but of varints and what has a length; 3 and 4 begin and end a group of fields.
_FIXED = {1: 8, 3: 0, 4: 0, 5: 4}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number. Returns: it, and where the next byte is. Raises: IndexError, ValueError: there is none."""
    value = data[at]
    if value < 128:
        return value, at + 1
    value &= 127
    for shift in range(7, 70, 7):
        byte = data[at + shift // 7]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + shift // 7 + 1
    raise ValueError("a number of more than 10 bytes")


def check_message(message: Message, table: Table, rules: Rules, path: str = "") -> None:
    """Check a message against the table.

    Raises:
        InvalidRequest: with the first field that exceeds its bound, its value and the bound.
        KeyError: the message is not in the table, which is a bug.
    """
    name = message.DESCRIPTOR.full_name
    for field, bound in table[name].items():
        _check_field(message, field, bound, table, rules, f"{path}{field}")
    rule = rules.get(name)
    problem = "" if rule is None else rule(message)
    if problem:
        raise InvalidRequest(f"{path.removesuffix('.') or 'the request'}: {problem}")


def _check_field(message: Message, field: str, bound: Bound, table: Table, rules: Rules, path: str) -> None:
    if isinstance(bound, SubMessage):
        if message.HasField(field):
            check_message(getattr(message, field), table, rules, f"{path}.")
        elif bound.required:
            raise InvalidRequest(f"{path} is not set")
        return
    value = getattr(message, field)
    if not isinstance(bound, Items):
        _refuse(path, value, bound.problem(value))
        return
    if len(value) > bound.most:
        raise InvalidRequest(f"{path} has {len(value)} items; at most {bound.most}")
    if bound.each is None:
        return
    for index, item in enumerate(value):
        if isinstance(bound.each, SubMessage):
            check_message(item, table, rules, f"{path}[{index}].")
        else:
            problem = bound.each.problem(item)
            if problem:
                _refuse(f"{path}[{index}]", item, problem)


def _refuse(path: str, value: object, problem: str) -> None:
    if not problem:
        return
    text = f"{value:g}" if isinstance(value, float) and not math.isfinite(value) else repr(value)
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    raise InvalidRequest(f"{path} is {shown}; it {problem}")
