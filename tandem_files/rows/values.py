"""What a row must hold: its columns by their names, its answer and tools."""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

_NAMED_COLUMNS = 20
# Most digits of a number without an exponent.
_MOST_DIGITS = 40


class BadRow(ValueError):
    """A row cannot be used; the message says why, without the place."""


class NoColumn(BadRow):
    """A row lacks a column.

    Attributes:
        alone: the message if other rows of the file have it, so that its name is right.
    """

    def __init__(self, key: str, option: str, present: list[str]) -> None:
        super().__init__(missing_column(key, option, present))
        close = difflib.get_close_matches(key, present, n=1)
        misspelt = f" (did you mean its {close[0]!r}?)" if close else ""
        self.alone = f"has no {key!r}, which other rows of the file have{misspelt}: fill it in, or remove the row"


def column(record: Mapping[str, Any], key: str, option: str) -> Any:
    """Return the value of a column; dots lead into columns that hold objects, unless a column has that very name.

    Args:
        option: the setting that names the column, for the message.
    Raises: NoColumn: there is none.
    """
    if key in record:
        return record[key]
    value: Any = record
    above: list[str] = []
    for part in key.split("."):
        if isinstance(value, list):
            name = ".".join(above)
            raise BadRow(
                f"{name!r} is a list, into which dots do not lead: set {option} to {name}, if it holds messages"
            )
        if not isinstance(value, Mapping) or part not in value:
            raise NoColumn(key, option, list(_names(record)))
        value = value[part]
        above.append(part)
    return value


def missing_column(key: str, option: str, present: list[str]) -> str:
    """Say that a row has no such column, and which it has."""
    close = difflib.get_close_matches(key, present, n=1)
    named = ", ".join(map(repr, present[:_NAMED_COLUMNS])) + (", ..." if len(present) > _NAMED_COLUMNS else "")
    hint = f"did you mean {close[0]!r}?" if close else f"it has {named or 'nothing'};"
    return f"has no {key!r}: {hint} set {option} to the column's name"


def answer_of(record: Mapping[str, Any], key: str | None, raw: bytes = b"") -> str:
    """Return the answer as text; "" if rows have none; a list of accepted answers as a JSON list of texts.

    A number is the text that the file has, 0.00001 and not 1e-05; of a Parquet file, which has none, its shortest.

    Args:
        raw: the row's JSON; b"" of a Parquet file.
    Raises: BadRow.
    """
    if key is None:
        return ""
    value = column(record, key, "data.answer_key")
    if raw and any(isinstance(one, float) for one in (value if isinstance(value, list) else [value])):
        value = column(json.loads(raw, parse_float=_Digits), key, "data.answer_key")
    if isinstance(value, list) and value:
        texts = [_answer_text(one) for one in value]
        if None not in texts:
            return json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False) if len(set(texts)) > 1 else str(texts[0])
    text = _answer_text(value)
    if text is not None:
        return text
    advice = " (data.answer_key: null, if no reward needs an answer)" if value is None else ""
    if isinstance(value, Mapping):
        fitting = [name for name, inner in value.items() if isinstance(inner, (str, int, float, list))]
        advice = f": set data.answer_key to {key}.{fitting[0]}" if fitting else ""
    raise BadRow(
        f"{key!r} is {shown(value)}; it must be a string or a number, a truth value or a list of these{advice}"
    )


class _Digits(str):
    """The text of a number."""


def _answer_text(value: Any) -> str | None:
    """Return the text of one answer; None: it has none."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return number_text(value) if isinstance(value, float) and math.isfinite(value) else None


def number_text(value: float | Decimal) -> str:
    """Return the shortest exact text of a number: 6 for 6.0, 0.00001 for 1e-05; of many zeros with an exponent.

    >>> [number_text(value) for value in (6.0, 1e-05, 0.1, -2.50, 1e17, 1e300, Decimal("6.50"))]
    ['6', '0.00001', '0.1', '-2.5', '100000000000000000', '1e+300', '6.5']
    """
    digits = Decimal(repr(value)) if isinstance(value, float) else value
    text = format(digits.normalize(), "f")
    return text if len(text) <= _MOST_DIGITS else str(value)


def tools_of(record: Mapping[str, Any], key: str | None) -> list[dict[str, Any]] | None:
    """Return the tools' schemas; None: the row has none. Raises: BadRow."""
    if key is None:
        return None
    value = column(record, key, "data.tools_key")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow(f"{key!r} is a text that is no JSON ({error}); tools are a list of JSON schemas") from error
    if value in (None, "", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow(f"{key!r} is {shown(value)}; tools are a list of JSON schemas")
    return value


def check_unicode(value: Any, name: str) -> None:
    """Refuse lone surrogates, which JSON can escape and no encoding can write. Raises: BadRow."""
    for path, text in _texts(value, name):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise BadRow(
                f"{path!r} is not Unicode: {half} at character {error.start + 1} is half of a surrogate pair"
            ) from None


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield every text within a value, keys of objects included, with its path."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            path = f"{name}.{key}" if name else str(key)
            yield path.encode(errors="replace").decode(), str(key)
            yield from _texts(inner, path)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _texts(inner, f"{name}[{place}]")


def _names(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of columns, and of the columns within them."""
    for name, value in record.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in value)


def without_nulls(value: Any) -> Any:
    """Return a nested value without the null fields of its objects: Parquet gives every object every field."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def shown(value: Any) -> str:
    """Return a value's type and beginning, for messages."""
    return f"{'null' if value is None else type(value).__name__} ({value!r:.40})"
