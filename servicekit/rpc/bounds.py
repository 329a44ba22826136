"""Bounds of the fields of a request, and the check of a whole message against a table of bounds.

A bad request is refused, with field and value, before a handler gets it: no deadline without end, no list that fills
the memory, no name that leads out of a folder. What depends on more than the request (a vocabulary, a state) is checked
where that is known.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from servicekit.errors import InvalidRequest

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
