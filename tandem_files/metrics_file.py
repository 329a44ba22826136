"""metrics.jsonl: a row per iteration, written by the coordinator, read by everyone who shows a run."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from tandem_files.atomic import naming, nothing_more, write_bytes_atomic

METRICS_FILE = "metrics.jsonl"
Row = dict[str, float | int | None]


class MetricsFile:
    """metrics.jsonl: appended row by row, cut back on a resume."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, row: Row, last_look: Callable[[], None] = nothing_more) -> None:
        """Add a row, whole or not at all; it outlives the process when this returns, and a power cut after `sync`.

        last_look: called in the moment before; what it raises leaves the file as it is.
        Raises: OSError: naming the file; no part of the row is in it.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with naming(self._path), self._path.open("ab", buffering=0) as file:
            last_look()
            end = file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(end)
                raise

    def sync(self) -> None:
        """Force all rows to disk. Raises: OSError: naming the file."""
        with naming(self._path), self._path.open("ab") as file:
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """All whole rows; lines that a crash has torn are left out."""
        if not self._path.exists():
            return []
        rows: list[Row] = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("iteration"), int):
                rows.append(row)
        return rows

    def cut_after(self, iteration: int) -> int:
        """Remove rows after `iteration`, and torn ones, atomically. Returns: how many rows up to it are missing."""
        kept = [row for row in self.rows() if (row["iteration"] or 0) <= iteration]
        write_bytes_atomic(self._path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept).encode())
        return iteration - len(kept)
