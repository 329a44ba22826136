"""Reads prompts and answers from a JSONL or Parquet file, and reports every problem with its file and line."""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
# Row numbers that a fault is reported with besides the first.
_OTHERS_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A prompt with its reference answer."""

    # 1-based line of a JSONL file, 1-based row of a Parquet file.
    number: int
    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProblem:
    """A problem of a data file; `number` is its line or row, None for the file as a whole."""

    file: Path
    number: int | None
    message: str
    # Other lines or rows with the same fault, and the first of them.
    num_others: int = 0
    others: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The message, with the other rows that have the same fault."""
        if not self.num_others:
            return self.message
        named = ", ".join(map(str, self.others)) + (", ..." if self.num_others > len(self.others) else "")
        rows = "row" if self.num_others == 1 else "rows"
        return f"{self.message} (and {self.num_others} more {rows} with the same fault: {named})"

    def __str__(self) -> str:
        place = str(self.file) if self.number is None else f"{self.file}:{self.number}"
        return f"{place}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsResult:
    """The valid rows, and the problems of the others: one per kind of fault, at most `limit` of them."""

    rows: list[Row]
    problems: list[RowProblem]
    # Problems beyond the limit: counted, not described.
    more_problems: int


class DataError(ValueError):
    """A data file cannot be used; the message lists its problems."""

    def __init__(self, problems: list[RowProblem], more_problems: int = 0) -> None:
        self.problems = problems
        tail = [f"... and {more_problems} more problems"] if more_problems else []
        super().__init__("\n".join([*map(str, problems), *tail]))


def read_rows(path: Path, *, prompt_key: str, answer_key: str, limit: int = 20) -> RowsResult:
    """Read a data file and validate every row; bad data do not raise.

    Args:
        path: a .jsonl or .parquet file.
        prompt_key: column of the prompts, strings that are not empty.
        answer_key: column of the answers, strings.
        limit: largest number of kinds of faults that are described.
    Returns: rows and problems; rows with the same fault share a problem.
    """
    rows: list[Row] = []
    faults: dict[str, RowProblem] = {}
    for item in _items(path, prompt_key, answer_key):
        if isinstance(item, Row):
            rows.append(item)
        else:
            kind = _kind(item.message)
            faults[kind] = _with_another(faults[kind], item) if kind in faults else item
    if not rows and not faults:
        faults[""] = _problem(path, None, "has no rows: add at least one with a prompt and an answer")
    problems = list(faults.values())
    more = sum(1 + problem.num_others for problem in problems[limit:])
    return RowsResult(rows=rows, problems=problems[:limit], more_problems=more)


def _kind(message: str) -> str:
    """Return what messages of the same fault have in common: the text without values and places."""
    return re.sub(r"\(.*\)|\d+|0x\w+", "", message, flags=re.DOTALL)


def _with_another(first: RowProblem, other: RowProblem) -> RowProblem:
    named = (
        first.others if other.number is None or len(first.others) == _OTHERS_NAMED else (*first.others, other.number)
    )
    return replace(first, num_others=first.num_others + 1, others=named)


def _items(path: Path, prompt_key: str, answer_key: str) -> Iterator[Row | RowProblem]:
    if not path.is_file():
        kind = "is not a file" if path.exists() else "does not exist"
        return iter([_problem(path, None, kind)])
    if path.suffix in JSONL_SUFFIXES:
        return _read_jsonl(path, prompt_key, answer_key)
    if path.suffix in PARQUET_SUFFIXES:
        return _read_parquet(path, prompt_key, answer_key)
    known = ", ".join(JSONL_SUFFIXES + PARQUET_SUFFIXES)
    return iter([_problem(path, None, f"has the suffix {path.suffix!r}; known are {known}")])


def _problem(path: Path, number: int | None, message: str) -> RowProblem:
    return RowProblem(file=path, number=number, message=message)


def _read_jsonl(path: Path, prompt_key: str, answer_key: str) -> Iterator[Row | RowProblem]:
    """Read a JSONL file, each line decoded alone, so that invalid UTF-8 has a line number; blank lines are skipped."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield _jsonl_row(path, number, raw, prompt_key, answer_key)


def _jsonl_row(path: Path, number: int, raw: bytes, prompt_key: str, answer_key: str) -> Row | RowProblem:
    try:
        record = json.loads(raw.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return _problem(
            path, number, f"is not valid UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start} of the line"
        )
    except json.JSONDecodeError as error:
        return _problem(path, number, f"is not valid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets thousands deep
        return _problem(path, number, f"is JSON that cannot be parsed: {error}")
    if not isinstance(record, dict):
        return _problem(
            path, number, f'holds a JSON {type(record).__name__}; expected an object like {{"{prompt_key}": ...}}'
        )
    return _row(path, number, record, prompt_key, answer_key)


def _row(path: Path, number: int, record: dict[str, Any], prompt_key: str, answer_key: str) -> Row | RowProblem:
    for key, option in ((prompt_key, "data.prompt_key"), (answer_key, "data.answer_key")):
        if key not in record:
            return _problem(path, number, _missing_key(key, option, list(record)))
        if not isinstance(record[key], str):
            kind = "null" if record[key] is None else type(record[key]).__name__
            return _problem(path, number, f"{key!r} is {kind} ({record[key]!r:.40}); it must be a string")
        if (place := _unencodable_at(record[key])) is not None:
            half = f"\\u{ord(record[key][place]):04x}"
            return _problem(
                path, number, f"{key!r} is not Unicode: {half} at character {place + 1} is half of a surrogate pair"
            )
    if not record[prompt_key]:
        return _problem(path, number, f"{prompt_key!r} is empty")
    return Row(number=number, prompt=record[prompt_key], answer=record[answer_key])


def _unencodable_at(value: str) -> int | None:
    """Return the place of a lone surrogate, which JSON can escape and no encoding can write; None: there is none."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _missing_key(key: str, option: str, present: list[str]) -> str:
    close = difflib.get_close_matches(key, present, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, present)) or 'nothing'};"
    return f"has no {key!r}: {hint} set {option} to the column's name"


def _read_parquet(path: Path, prompt_key: str, answer_key: str) -> Iterator[Row | RowProblem]:
    # Imported here: it takes 0.2 s and most data is JSONL.
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        hint = "build the image with TANDEM_PARQUET=1 (docs/docker.md), or convert the file to JSON lines"
        yield _problem(path, None, f"is a Parquet file, and pyarrow, which reads it, is not installed: {hint}")
        return
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [
                (k, o) for k, o in ((prompt_key, "data.prompt_key"), (answer_key, "data.answer_key")) if k not in names
            ]
            for key, option in missing:
                yield _problem(path, None, _missing_key(key, option, names))
            if missing:
                return
            number = 0
            for batch in file.iter_batches(columns=[prompt_key, answer_key]):
                for record in batch.to_pylist():
                    number += 1
                    yield _row(path, number, record, prompt_key, answer_key)
    except (pyarrow.ArrowException, OSError) as error:
        yield _problem(path, None, f"is not a readable Parquet file: {error}")
