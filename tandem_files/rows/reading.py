"""Streams the rows of a JSONL or Parquet file, and reports each one that cannot be used with its file and line."""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem_files.rows.files import is_parquet
from tandem_files.rows.parquet import read_records, without_nulls
from tandem_files.rows.problems import DataError, RowProblem
from tandem_files.rows.values import BadRow, Message, NoColumn, answer_of, check_unicode, prompt_of, tools_of

# A longer line is not a row but, say, a whole file of JSON; it would be read into memory whole.
MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_NO_ROWS = "has no rows: add at least one with a prompt"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKeys:
    """The columns of a row that have a meaning; dots lead into columns."""

    prompt: str = "prompt"
    # None: rows have no answer, or no tools.
    answer: str | None = "answer"
    tools: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row that can be used."""

    file: Path
    # 1-based line of a JSONL file, 1-based row of a Parquet file.
    number: int
    # A text, or messages.
    prompt: str | list[Message]
    # As text; "" if rows have none.
    answer: str
    tools: list[dict[str, Any]] | None = None
    # All columns.
    columns: dict[str, Any]
    # Byte at which the line begins, and its checksum; 0 in a Parquet file.
    offset: int = 0
    checksum: int = 0
    # Share of the file that has been read.
    share: float = 0.0

    def problem(self, message: str) -> RowProblem:
        """Return a problem of this row."""
        return RowProblem(file=self.file, number=self.number, message=message)


def read_rows(path: Path, keys: RowKeys, hashed: Callable[[bytes], object] | None = None) -> Iterator[Row | RowProblem]:
    """Yield the rows of a file, or the problem of each that cannot be used; bad data do not raise.

    Args:
        path: a file of `find_files`.
        hashed: is given every byte of a JSONL file in order, to take its digest in the same pass.
    """
    empty = True
    for item in _parquet_rows(path, keys) if is_parquet(path) else _jsonl_rows(path, keys, hashed):
        empty = False
        yield item
    if empty:
        yield RowProblem(file=path, number=None, message=_NO_ROWS)


def first_record(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the number and the columns of a file's first row, whatever their names. Raises: DataError; OSError."""
    if is_parquet(path):
        for number, _, record in read_records(path):
            return number, {name: without_nulls(value) for name, value in record.items()}
    else:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if raw.removeprefix(_BOM).strip():
                    return number, _first_of_lines(path, number, raw.removeprefix(_BOM))
    raise DataError.of(path, _NO_ROWS)


def _first_of_lines(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        return _record_of_line(raw, RowKeys())
    except BadRow as error:
        raise DataError.of(path, str(error), number) from error


def row_of_line(path: Path, number: int, raw: bytes, keys: RowKeys) -> Row:
    """Parse a line. Raises: BadRow."""
    return _row(path, number, _record_of_line(raw, keys), keys, raw)


def _record_of_line(raw: bytes, keys: RowKeys) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise BadRow(
            f"is not valid UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start} of the line"
        ) from error
    except json.JSONDecodeError as error:
        raise BadRow(f"is not valid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise BadRow("holds an integer of more than 4,300 digits: write it as a text, in quotes") from error
    except RecursionError as error:
        raise BadRow(f"is JSON that cannot be parsed: {error}") from error
    if not isinstance(record, dict):
        raise BadRow(f'holds a JSON {type(record).__name__}; expected an object like {{"{keys.prompt}": ...}}')
    if b"\\u" in raw:  # lone surrogates can only come from escapes
        check_unicode(record, "")
    return record


def line_checksum(raw: bytes) -> int:
    """Compute the CRC-32 of a line, whatever ends it."""
    return zlib.crc32(raw.rstrip(b"\r\n"))


def _row(path: Path, number: int, record: dict[str, Any], keys: RowKeys, raw: bytes = b"") -> Row:
    return Row(
        file=path,
        number=number,
        prompt=prompt_of(record, keys.prompt),
        answer=answer_of(record, keys.answer, raw),
        tools=tools_of(record, keys.tools),
        columns=record,
    )


def _jsonl_rows(
    path: Path, keys: RowKeys, hashed: Callable[[bytes], object] | None = None
) -> Iterator[Row | RowProblem]:
    """Read line by line, each decoded alone, so that invalid UTF-8 has a line number; blank lines are skipped."""
    size = max(1, path.stat().st_size)
    offset = number = 0
    with path.open("rb") as file:
        while raw := file.readline(MAX_LINE_BYTES):
            if hashed is not None:
                hashed(raw)
            number += 1
            begin, offset = offset, offset + len(raw)
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                what = f"is longer than {MAX_LINE_BYTES >> 20} MiB: is the file JSON lines, with a row on each?"
                raise DataError.of(path, what, number)
            if number == 1 and raw.startswith(_BOM):
                raw, begin = raw[len(_BOM) :], len(_BOM)
            if not raw.strip():
                continue
            try:
                row = row_of_line(path, number, raw, keys)
                yield replace(row, offset=begin, checksum=line_checksum(raw), share=offset / size)
            except BadRow as error:
                yield _problem(path, number, error)


def _parquet_rows(path: Path, keys: RowKeys) -> Iterator[Row | RowProblem]:
    for number, share, record in read_records(path):
        try:
            yield replace(_row(path, number, _without_fillings(record, keys), keys), share=share)
        except BadRow as error:
            yield _problem(path, number, error)


def _problem(path: Path, number: int, error: BadRow) -> RowProblem:
    alone = error.alone if isinstance(error, NoColumn) else ""
    return RowProblem(file=path, number=number, message=str(error), alone=alone)


def _without_fillings(record: dict[str, Any], keys: RowKeys) -> dict[str, Any]:
    """Return the record without the nulls that Parquet fills into messages and tools where others have a value."""
    names = {key if key in record else key.partition(".")[0] for key in (keys.prompt, keys.tools) if key is not None}
    return {name: without_nulls(value) if name in names else value for name, value in record.items()}
