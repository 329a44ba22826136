"""What a pass over a source has found, kept in the run's folder.

The launcher reads all rows to check them; the coordinator, which starts a moment later, and again after a crash, need
not render and tokenize them once more. An index has the name of its key: the files (place, size, times, inode) and the
settings that decide what a pass finds. Other files or settings have no index, and there is nothing to compare. A change
within one tick of the clock would leave the times as they are, so files that have just been written get no index.
"""

import io
import json
import time
import zipfile
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.data.columns import FileColumns
from coordinator.data.scan import Scan
from coordinator.data.sources import RowSource, SourceFile
from servicekit.logs import get_logger
from tandem_clients.formatting import PromptFormat
from tandem_config.schema import DataSection
from tandem_files.atomic import remove_each, write_bytes_atomic
from tandem_files.digests import text_digest
from tandem_files.rows.reading import Row

log = get_logger(__name__)

FOLDER = "data-index"
# Version of the format; part of the key.
_FORMAT = 3
# File systems keep times in ticks of up to 2 s.
_TICK_S = 2.0
# Fields of a Scan that are kept; `overlong` quotes rows, and `faults` are none.
_COUNTS = ("num_rows", "num_used", "longest_overlong", "longest", "rendered", "columns", "digest")


@dataclass(kw_only=True, slots=True)
class RowPlaces:
    """Where the usable rows of a file lie: byte offset, number and checksum of each."""

    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    numbers: "array[int]" = field(default_factory=lambda: array("I"))
    checksums: "array[int]" = field(default_factory=lambda: array("I"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowIndex:
    """What a pass has found, by the key of the source; the files in their order, those without rows left out."""

    key: str
    scan: Scan
    places: Mapping[Path, RowPlaces]

    def write(self, run_dir: Path) -> None:
        """Write the index into a run's folder. Raises: OSError."""
        files = list(self.places)
        about = {name: getattr(self.scan, name) for name in _COUNTS}
        about |= {"num_overlong": dict(self.scan.num_overlong), "files": list(map(str, files))}
        about["by_file"] = {str(file): asdict(columns) for file, columns in self.scan.by_file.items()}
        arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
        arrays["texts"] = np.asarray(self.scan.texts)
        for number, file in enumerate(files):
            for name in RowPlaces.__slots__:
                arrays[f"{name}{number}"] = np.asarray(getattr(self.places[file], name))
        content = io.BytesIO()
        np.savez(content, **arrays)
        (run_dir / FOLDER).mkdir(exist_ok=True)
        write_bytes_atomic(run_dir / FOLDER / f"{self.key}.npz", content.getvalue(), durable=False)


def write_indices(run_dir: Path, indices: Sequence[RowIndex]) -> None:
    """Replace the indices in a run's folder. Raises: OSError."""
    for text in remove_each((run_dir / FOLDER).glob("*.npz")):  # of other data than the run's, or replaced below
        log.warning("earlier index of the data not removed", why=text)
    for index in indices:
        index.write(run_dir)


class Indexer:
    """Makes the index of a source from the rows of a pass; make it before the pass."""

    def __init__(self, section: DataSection, source: RowSource, formats: PromptFormat) -> None:
        self._section, self._source, self._formats = section, source, formats
        self._begun_s = time.time()
        self._key = index_key(section, source, formats)
        self._places: dict[Path, RowPlaces] = {}

    def add(self, file: SourceFile, row: Row) -> None:
        """Add a row that is used."""
        places = self._places.get(file.path)
        if places is None:
            places = self._places[file.path] = RowPlaces()
        places.offsets.append(row.offset)
        places.numbers.append(row.number)
        places.checksums.append(row.checksum)

    def index(self, scan: Scan) -> RowIndex | None:
        """Return the index; None: what was found does not stay, or cannot be used."""
        states = [file.path.stat() for file in self._source.files]
        changed_s = max(max(state.st_mtime, state.st_ctime) for state in states)
        if changed_s > self._begun_s - _TICK_S or self._formats.uses_clock:
            return None
        if scan.faults.problems or (scan.num_overlong and self._section.overlong_prompts == "error"):
            return None
        if index_key(self._section, self._source, self._formats) != self._key:  # changed meanwhile
            return None
        return RowIndex(key=self._key, scan=scan, places=self._places)


def index_key(section: DataSection, source: RowSource, formats: PromptFormat) -> str:
    """Return the key of a source as its files are now. Raises: OSError."""
    files = [
        [
            str(file.path),
            file.name,
            file.keys.prompt,
            file.keys.answer,
            file.keys.tools,
            file.keys.system,
            *_stamp(file.path),
        ]
        for file in source.files
    ]
    settings = [section.max_prompt_tokens, section.overlong_prompts, section.prompt_as]
    rendered = [formats.tokenizer_digest(), formats.identity()]
    return text_digest(json.dumps([_FORMAT, files, settings, rendered], sort_keys=True))


def read_index(run_dir: Path, key: str, source: RowSource) -> RowIndex | None:
    """Return the index of a key; None: there is none, or it cannot be read."""
    path = run_dir / FOLDER / f"{key}.npz"
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            texts = array("Q", arrays["texts"].tobytes())
            places = {
                Path(file): RowPlaces(
                    offsets=array("Q", arrays[f"offsets{number}"].tobytes()),
                    numbers=array("I", arrays[f"numbers{number}"].tobytes()),
                    checksums=array("I", arrays[f"checksums{number}"].tobytes()),
                )
                for number, file in enumerate(about["files"])
            }
        counts = {name: about[name] for name in _COUNTS}
        by_file = {Path(file): FileColumns.load(columns) for file, columns in about["by_file"].items()}
        scan = Scan(source=source, num_overlong=Counter(about["num_overlong"]), by_file=by_file, texts=texts, **counts)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        log.warning("data index cannot be read: the data are read again", path=str(path), error=str(error))
        return None
    return RowIndex(key=key, scan=scan, places=places)


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
