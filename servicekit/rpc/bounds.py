"""What a field of a request may hold, and the walk that checks a whole message against a table of that.

A request is refused here, before any handler sees it, by field and value: no handler can be given a deadline that never
comes, a list that fills the memory, or a name that leads out of a folder. What depends on more than the request (a
vocabulary, a state) is checked where that is known.
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
    """A finite number from `low` to `high`; or_zero: 0, "not set", passes too."""

    low: float
    high: float
    or_zero: bool = False

    def problem(self, value: float) -> str:
        """Returns: what is wrong with it, "" if nothing is."""
        if self.low <= value <= self.high or (self.or_zero and value == 0):  # no comparison holds for NaN
            return ""
        return f"must be {'0, or ' if self.or_zero else ''}from {self.low:.15g} to {self.high:.15g}"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A string of at most `longest` characters that matches the whole `pattern`; any without control characters."""

    longest: int
    pattern: str = r"[^\x00-\x1f]*"

    def problem(self, value: str) -> str:
        """See Number."""
        if len(value) > self.longest:
            return f"has {len(value)} characters, must have at most {self.longest}"
        return "" if re.fullmatch(self.pattern, value) else f"must match {self.pattern}"


class Flag:
    """True or false."""

    def problem(self, value: bool) -> str:
        """See Number."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A declared value of an enum of this many, 0 included; whether 0 will do is the handler's to say."""

    last: int

    def problem(self, value: int) -> str:
        """See Number."""
        return "" if 0 <= value <= self.last else f"must be a declared value, 0 to {self.last}"


@dataclass(frozen=True, kw_only=True)
class SubMessage:
    """A message, with a table of its own. required: it must be there."""

    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Items:
    """At most `most` of what `each` says; None: judged in a thread by the handler, as they may be millions."""

    most: int
    each: "Number | Text | SubMessage | None"


Bound = Number | Text | Flag | Choice | SubMessage | Items
# By full name of the message, then by field.
Table = Mapping[str, Mapping[str, Bound]]
# What must hold for fields together. Returns: what is wrong, "" if nothing is.
Rules = Mapping[str, Callable[[Any], str]]


def check_message(message: Message, table: Table, rules: Rules, path: str = "") -> None:
    """Raises: InvalidRequest: naming the first field that breaks its bound, its value and the bound.

    KeyError: the message is not in the table, which is a bug of ours.
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
            _refuse(f"{path}[{index}]", item, bound.each.problem(item))


def _refuse(path: str, value: object, problem: str) -> None:
    if not problem:
        return
    text = f"{value:g}" if isinstance(value, float) and not math.isfinite(value) else repr(value)
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    raise InvalidRequest(f"{path} is {shown}; it {problem}")
