"""The folder `samples/` of a run: a file per iteration and kind, written by the coordinator.

samples/00000012.train.parquet      the iteration's samples
        00000012.heldout.parquet    those of an evaluation after it (00000000: before the first iteration)

Only the user who runs the coordinator can open the folder: prompts and completions may be confidential.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from servicekit.errors import ConfigError
from tandem_files.atomic import no_check, remove_each, write_bytes_atomic
from tandem_files.samples.schema import (
    COMPRESSION,
    HEAD_COLUMNS,
    REPEATED,
    SampleHead,
    StoredSample,
    heads_of,
    samples_of,
)

SAMPLES_FOLDER = "samples"
# Samples that are read together: 16 MiB of completions of 8,000 tokens.
_ROW_GROUP = 512
_FILE = re.compile(r"(?P<iteration>\d{8,})\.(?P<kind>[^/]+)\.parquet")
# Characters of an evaluation set's name that a file name may have.
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
# Iterations that an error lists.
_LISTED = 12


class SampleFolder:
    """Stored samples of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / SAMPLES_FOLDER

    def write(self, iteration: int, kind: str, table: pa.Table, before_write: Callable[[], None] = no_check) -> int:
        """Write the samples of an iteration, atomically, in place of earlier ones of the same kind.

        Args:
            table: of schema.table_of.
            before_write: called immediately before the file is replaced; if it raises, the old one stays.
        Returns: the file's bytes.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression=COMPRESSION, row_group_size=_ROW_GROUP, use_dictionary=REPEATED)
        content = buffer.getvalue().to_pybytes()
        # Not forced to disk: after a power cut the run repeats its last iterations anyway.
        write_bytes_atomic(self._path(iteration, kind), content, before_write, durable=False)
        return len(content)

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each stored iteration, ascending."""
        stored = self._files()
        return {number: sum(path.stat().st_size for path in files.values()) for number, files in stored.items()}

    def iterations(self) -> dict[int, list[str]]:
        """Return the stored iterations, ascending, with their kinds: the training samples first."""
        return {
            iteration: sorted(files, key=lambda kind: (kind != "train", kind))
            for iteration, files in self._files().items()
        }

    def remove(self, iteration: int, before_write: Callable[[], None] = no_check) -> list[str]:
        """Remove all samples of an iteration. Returns and takes as remove_each."""
        own = re.compile(rf"{iteration:08}\.[^/]+\.parquet")
        found = [path for path in (self._folder.iterdir() if self._folder.is_dir() else ()) if own.fullmatch(path.name)]
        return remove_each(found, before_write)

    def resolve(self, iteration: int | None, kind: str | None) -> tuple[int, str]:
        """Find the samples that are meant.

        Args:
            iteration: None: the last one that has such samples.
            kind: None: the training samples if the iteration has them.
        Raises: ConfigError: there are none; it lists what is stored.
        """
        stored = self.iterations()
        if not stored:
            raise ConfigError(
                f"{self._run_dir} has no stored samples: samples.enabled is false, its first iteration has not ended, "
                "or it was made by an older release"
            )
        fitting = [number for number, kinds in stored.items() if kind is None or kind in kinds]
        if not fitting:
            known = ", ".join(sorted({name for kinds in stored.values() for name in kinds}))
            raise ConfigError(f"{self._run_dir} has no samples of kind {kind!r}; stored: {known}")
        number = fitting[-1] if iteration is None else iteration
        if number not in fitting:
            of_kind = "" if kind is None else f" of kind {kind!r}"
            raise ConfigError(
                f"{self._run_dir} has no samples{of_kind} of iteration {number}; stored: {_listed(fitting)}"
            )
        return number, stored[number][0] if kind is None else kind

    def heads(self, iteration: int, kind: str) -> list[SampleHead]:
        """Read all samples of an iteration without their texts, in the order of their places."""
        with _reading(self._stored(iteration, kind)) as file:
            return heads_of(file.read(columns=HEAD_COLUMNS))

    def load(self, iteration: int, kind: str, places: Sequence[int]) -> list[StoredSample]:
        """Read the samples at these places, in this order."""
        if not places:
            return []
        with _reading(self._stored(iteration, kind)) as file:
            parts = sorted({place // _ROW_GROUP for place in places})
            table = file.read_row_groups(parts)
        starts = {part: index * _ROW_GROUP for index, part in enumerate(parts)}
        return samples_of(table.take([starts[place // _ROW_GROUP] + place % _ROW_GROUP for place in places]))

    def matching(self, iteration: int, kind: str, pattern: str) -> list[int]:
        """Return the places of the samples with `pattern` in prompt or completion.

        Args:
            pattern: regular expression of RE2, whose time is linear in the text.
        Raises: ConfigError: it is not one.
        """
        found: list[int] = []
        with _reading(self._stored(iteration, kind)) as file:
            for part in range(file.num_row_groups):
                table = file.read_row_group(part, columns=["prompt", "completion"])
                try:
                    hits = [pc.match_substring_regex(column, pattern) for column in table.columns]
                except pa.ArrowInvalid as error:
                    raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from None
                both = pc.or_(*hits).to_pylist()
                found += [part * _ROW_GROUP + place for place, hit in enumerate(both) if hit]
        return found

    def _path(self, iteration: int, kind: str) -> Path:
        return self._folder / f"{iteration:08}.{_UNSAFE.sub('-', kind) or '-'}.parquet"

    def _stored(self, iteration: int, kind: str) -> Path:
        path = self._path(iteration, kind)
        if not path.is_file():
            raise ConfigError(f"{self._run_dir} has no samples of kind {kind!r} of iteration {iteration}")
        return path

    def _files(self) -> dict[int, dict[str, Path]]:
        """Return the files by iteration, ascending, and kind."""
        found: dict[int, dict[str, Path]] = {}
        paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        for path in paths:
            match = _FILE.fullmatch(path.name)
            if match is not None:
                found.setdefault(int(match["iteration"]), {})[match["kind"]] = path
        return dict(sorted(found.items()))


@contextmanager
def _reading(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Raises: ConfigError: it is damaged, or was removed meanwhile."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) <= _LISTED:
        return ", ".join(map(str, numbers))
    half = _LISTED // 2
    return ", ".join([*map(str, numbers[:half]), "...", *map(str, numbers[-half:])])
