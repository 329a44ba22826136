"""Streams the rows of a JSONL, JSON or Parquet file; each that cannot be used is reported with its file and line."""

import json
import mmap
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from tandem_files.rows.files import is_json, is_parquet
from tandem_files.rows.messages import Message, prompt_of, system_of
from tandem_files.rows.parquet import read_records
from tandem_files.rows.problems import DataError, RowProblem
from tandem_files.rows.values import BadRow, NoColumn, answer_of, check_unicode, tools_of, without_nulls

# A longer line is not a row but, say, a whole file of JSON; it would be read into memory whole.
MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_NO_ROWS = "has no rows: add at least one with a prompt"
_JSON_BEGIN = re.compile(rb"(?:\xef\xbb\xbf)?\s*(\[?)")
# What brackets enclose is found by brackets and texts; a row is parsed by itself.
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]|[^\s,:"\[\]{}]+', re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKeys:
    """The columns of a row that have a meaning; dots lead into columns."""

    # None: rows have no prompt, no answer, no tools, or no system prompt.
    prompt: str | None = "prompt"
    answer: str | None = "answer"
    tools: str | None = None
    system: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row that can be used."""

    file: Path
    # 1-based line of a JSONL file, 1-based row of another.
    number: int
    # A text, or messages.
    prompt: str | list[Message]
    # As text; "" if rows have none.
    answer: str
    tools: list[dict[str, Any]] | None = None
    system: str | None = None
    # All columns, without the null fields of objects within them.
    columns: dict[str, Any]
    # Byte at which the row begins, and its checksum; 0 in a Parquet file.
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
        hashed: is given every byte of a file that is not Parquet in order, to take its digest in the same pass.
    """
    empty = True
    for item in _parquet_rows(path, keys) if is_parquet(path) else _json_rows(path, keys, hashed):
        empty = False
        yield item
    if empty:
        yield RowProblem(file=path, number=None, message=_NO_ROWS)


def first_record(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the number and the columns of a file's first row, whatever their names. Raises: DataError; OSError."""
    if is_parquet(path):
        for number, _, record in read_records(path):
            return number, without_nested_nulls(record)
    else:
        for number, _, _, raw in _raw_rows(path, None):
            try:
                return number, _record_of_line(raw, RowKeys())
            except BadRow as error:
                raise DataError.of(path, str(error), number) from error
    raise DataError.of(path, _NO_ROWS)


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
        name = keys.prompt or "completion"
        raise BadRow(f'holds a JSON {type(record).__name__}; expected an object like {{"{name}": ...}}')
    if b"\\u" in raw:  # lone surrogates can only come from escapes
        check_unicode(record, "")
    return without_nested_nulls(record) if b"null" in raw else record


def without_nested_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the null fields within its columns: in Parquet they may be fillings, and so none counts."""
    return {name: without_nulls(value) for name, value in record.items()}


def read_raw(file: IO[bytes], path: Path, offset: int) -> bytes:
    """Return the bytes of the row that begins at an offset of a file that is not Parquet; b"": none ends there."""
    if is_json(path):
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return next((content[begin:end] for begin, end in _values(content, offset)), b"")
    file.seek(offset)
    return file.readline()


def line_checksum(raw: bytes) -> int:
    """Compute the CRC-32 of a line, whatever ends it."""
    return zlib.crc32(raw.rstrip(b"\r\n"))


def _row(path: Path, number: int, record: dict[str, Any], keys: RowKeys, raw: bytes = b"") -> Row:
    return Row(
        file=path,
        number=number,
        prompt="" if keys.prompt is None else prompt_of(record, keys.prompt),
        answer=answer_of(record, keys.answer, raw),
        tools=tools_of(record, keys.tools),
        system=system_of(record, keys.system),
        columns=record,
    )


def _json_rows(path: Path, keys: RowKeys, hashed: Callable[[bytes], object] | None) -> Iterator[Row | RowProblem]:
    size = max(1, path.stat().st_size)
    for number, begin, end, raw in _raw_rows(path, hashed):
        try:
            row = row_of_line(path, number, raw, keys)
            yield replace(row, offset=begin, checksum=line_checksum(raw), share=end / size)
        except BadRow as error:
            yield _problem(path, number, error)


def _raw_rows(path: Path, hashed: Callable[[bytes], object] | None) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (number from 1, offset, end, bytes) of the rows of a file that is not Parquet. Raises: DataError."""
    with path.open("rb") as file:
        yield from _elements(path, file, hashed) if is_json(path) else _lines(path, file, hashed)


def _lines(
    path: Path, file: IO[bytes], hashed: Callable[[bytes], object] | None
) -> Iterator[tuple[int, int, int, bytes]]:
    """Read line by line, each decoded alone, so that invalid UTF-8 has a line number; blank lines are skipped."""
    offset = number = 0
    is_first = True
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
        if is_first and raw.lstrip()[:1] == b"[":
            raise DataError.of(path, "is one JSON list, not a row on each line: give it the suffix .json", number)
        is_first = False
        yield number, begin, offset, raw


def _elements(
    path: Path, file: IO[bytes], hashed: Callable[[bytes], object] | None
) -> Iterator[tuple[int, int, int, bytes]]:
    """Find the rows of one JSON list, or of objects that follow each other."""
    if not path.stat().st_size:
        return
    # Closed with its last reader: no `with`, which cannot close it before them.
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for begin in range(0, len(content) if hashed is not None else 0, MAX_LINE_BYTES):
        hashed(content[begin : begin + MAX_LINE_BYTES])  # type: ignore[misc]
    begun = _JSON_BEGIN.match(content)
    is_open = begun is not None and begun[1] == b"["
    is_list, number = is_open, 0
    for begin, end in _values(content, 0 if begun is None else begun.end()):
        raw = content[begin:end]
        if is_open and raw == b"]":
            is_open = False
            continue
        number += 1
        if end > len(content) or (is_list and not is_open):
            raise DataError.of(path, f"its JSON {'is cut off' if end > len(content) else 'list ends before'}", number)
        yield number, begin, end, raw
    if is_open:
        raise DataError.of(path, f"its JSON list of {number} rows is not closed: the file is cut off")


def _values(content: mmap.mmap, offset: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the JSON values from an offset on; the end of one that is cut off is beyond the content."""
    depth = begin = 0
    for token in _JSON_TOKEN.finditer(content, offset):
        sign = token[0]
        if depth == 0:
            begin = token.start()
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(sign, 0)
        if depth <= 0:
            yield begin, token.end()
            depth = 0
    if depth:
        yield begin, len(content) + 1


def _parquet_rows(path: Path, keys: RowKeys) -> Iterator[Row | RowProblem]:
    for number, share, record in read_records(path):
        try:
            yield replace(_row(path, number, without_nested_nulls(record), keys), share=share)
        except BadRow as error:
            yield _problem(path, number, error)


def _problem(path: Path, number: int, error: BadRow) -> RowProblem:
    alone = error.alone if isinstance(error, NoColumn) else ""
    return RowProblem(file=path, number=number, message=str(error), alone=alone)
