"""Keeps where the rows of a source lie, 16 bytes for each, and reads those that are asked for."""

import json
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from coordinator.data.scan_cache import RowPlaces
from coordinator.data.sources import SourceFile
from servicekit.errors import ConfigError
from servicekit.logs import get_logger
from tandem_files.rows.files import is_parquet
from tandem_files.rows.reading import Row, line_checksum, read_raw, read_rows, row_of_line

log = get_logger(__name__)


@dataclass(kw_only=True, slots=True)
class _StoredFile:
    """The rows of a file that can be used: byte offset, number and checksum of each."""

    file: SourceFile
    # Size and time of change when it was read.
    stamp: tuple[int, int]
    # JSON lines made of a Parquet file, which has no quick way to a single row; None: the file itself has lines.
    lines: IO[bytes] | None
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    numbers: "array[int]" = field(default_factory=lambda: array("I"))
    checksums: "array[int]" = field(default_factory=lambda: array("I"))


class RowStore:
    """The rows of a source, in the files' order.

    A Parquet file is copied into a temporary file of JSON lines, without a name, which is gone with the process.

    Args:
        scratch: folder for such files; None: the system's folder for temporary files.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        self._scratch = scratch
        self._files: list[_StoredFile] = []
        # Rows in the files before each; made anew when a row is added.
        self._starts: list[int] = []

    def __len__(self) -> int:
        return sum(len(file.offsets) for file in self._files)

    def add(self, file: SourceFile, row: Row) -> None:
        """Add a row; those of a file follow each other."""
        if not self._files or self._files[-1].file != file:
            self._starts.append(len(self))
            self._files.append(self._begin(file))
        stored = self._files[-1]
        if stored.lines is None:
            stored.offsets.append(row.offset)
            stored.checksums.append(row.checksum)
        else:
            stored.offsets.append(stored.lines.tell())
            stored.checksums.append(self._copy(row, stored.lines))
        stored.numbers.append(row.number)

    def fill(self, file: SourceFile, places: RowPlaces) -> None:
        """Add the rows of a file that an index names; those of a Parquet file are read and copied.

        Raises: ConfigError: they are not there.
        """
        if is_parquet(file.path):
            numbers = iter(places.numbers)
            wanted = next(numbers, 0)
            for row in read_rows(file.path, file.keys):
                if isinstance(row, Row) and row.number == wanted:
                    self.add(file, row)
                    wanted = next(numbers, 0)
            if wanted:
                raise ConfigError(f"{file.path}:{wanted} is no longer there: the file has changed")
            return
        self._starts.append(len(self))
        stored = self._begin(file)
        stored.offsets, stored.numbers, stored.checksums = places.offsets, places.numbers, places.checksums
        self._files.append(stored)

    def _copy(self, row: Row, lines: IO[bytes]) -> int:
        """Append a row as JSON. Returns: the line's checksum."""
        line = json.dumps(row.columns).encode()
        try:
            lines.write(line + b"\n")
        except OSError as error:
            folder = tempfile.gettempdir() if self._scratch is None else self._scratch
            raise ConfigError(f"{row.file}: its rows cannot be copied to {folder}: {error.strerror}") from error
        return line_checksum(line)

    def read(self, indices: Sequence[int]) -> list[tuple[SourceFile, Row]]:
        """Return rows by index, each with its file.

        Raises: ConfigError: a file has changed, so that its rows lie elsewhere.
        """
        wanted: dict[int, list[int]] = {}
        for index in indices:
            wanted.setdefault(bisect_right(self._starts, index) - 1, []).append(index)
        found: dict[int, tuple[SourceFile, Row]] = {}
        for place, of_file in wanted.items():
            found.update(self._read_file(place, of_file))
        return [found[index] for index in indices]

    def _begin(self, file: SourceFile) -> _StoredFile:
        lines = None
        if is_parquet(file.path):
            lines = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115 - it lives as long as the store
        return _StoredFile(file=file, stamp=_stamp(file.path), lines=lines)

    def _read_file(self, place: int, indices: Sequence[int]) -> dict[int, tuple[SourceFile, Row]]:
        stored, start = self._files[place], self._starts[place]
        path = stored.file.path
        if stored.lines is not None:
            return {index: (stored.file, self._row(stored, stored.lines, index - start)) for index in indices}
        try:
            if _stamp(path) != stored.stamp:
                log.warning("data file has changed since it was read", file=str(path))
                stored.stamp = _stamp(path)
            with path.open("rb") as lines:
                return {index: (stored.file, self._row(stored, lines, index - start)) for index in indices}
        except OSError as error:
            raise ConfigError(f"{path} can no longer be read: {error.strerror}") from error

    def _row(self, stored: _StoredFile, lines: IO[bytes], place: int) -> Row:
        path, number = stored.file.path, stored.numbers[place]
        if stored.lines is None:
            raw = read_raw(lines, path, stored.offsets[place])
        else:
            lines.seek(stored.offsets[place])
            raw = lines.readline()
        if line_checksum(raw) != stored.checksums[place]:
            raise ConfigError(
                f"{path}:{number} is no longer what and where it was when the run began: the file has changed; restore "
                "it, and resume"
            )
        return row_of_line(path, number, raw, stored.file.keys)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
