"""The files of a ledger: records with checksums, which a reader finds again behind what is torn or altered.

ledger/00000007.log              a segment of the log: what happened, in order; sealed when the next one begins
       iteration-00000012.groups  finished groups of a wave of prompts, and scores of an iteration; removed when nothing
                                  can need them
       step-00000012.redo         a train step as it was sent, for a trainer that is lost before the next checkpoint

A record is a head (_HEAD), a JSON object, and bytes that it describes. Sealed segments do not change any more, and
each has one writer, so the folder may be on a network file system.
"""

import json
import mmap
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "ledger"
# The format of the records; a reader refuses a newer one by name. 2: steps may take groups of several waves.
FORMAT = 2
# Magic, bytes of the JSON object, bytes after it, CRC-32 of all of them.
_MAGIC = b"\x89TLr"
_HEAD = struct.Struct("<4sIII")
_SEGMENT = re.compile(r"(\d{8})\.log")
_GROUPS = re.compile(r"iteration-(\d{8,})\.groups")
_STEP = re.compile(r"step-(\d{8,})\.redo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """An entry of a ledger."""

    kind: str
    fields: Mapping[str, Any]
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoRecord:
    """Bytes of a file that are no record: torn by a crash, or altered."""

    path: Path
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.path}: {self.num_bytes} bytes at {self.offset} are no record"


def framed(record: Record) -> bytes:
    """Return the bytes of a record."""
    text = json.dumps({"kind": record.kind, **record.fields}, separators=(",", ":")).encode()
    return _HEAD.pack(_MAGIC, len(text), len(record.content), _crc(text, record.content)) + text + record.content


def read_records(path: Path, most: int | None = None) -> Iterator[Record | NoRecord]:
    """Yield the records of a file in order, and what lies between them.

    Args:
        most: bytes of the file that count; None: all.
    Raises: OSError.
    """
    with path.open("rb") as file:
        size = path.stat().st_size if most is None else min(most, path.stat().st_size)
        if not size:
            return
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            at = 0
            while at < size:
                found = _read(data, at)
                if found is not None:
                    record, at = found
                    yield record
                    continue
                begin, at = at, data.find(_MAGIC, at + 1)
                while at >= 0 and _read(data, at) is None:
                    at = data.find(_MAGIC, at + 1)
                at = size if at < 0 else at
                yield NoRecord(path=path, offset=begin, num_bytes=at - begin)


def _read(data: mmap.mmap, at: int) -> tuple[Record, int] | None:
    """Read a record. Returns: it, and where it ends; None: there is no whole one."""
    if at + _HEAD.size > len(data):
        return None
    magic, num_text, num_content, crc = _HEAD.unpack_from(data, at)
    begin = at + _HEAD.size
    middle, end = begin + num_text, begin + num_text + num_content
    if magic != _MAGIC or end > len(data):
        return None
    text, content = data[begin:middle], data[middle:end]
    if _crc(text, content) != crc:
        return None
    fields = json.loads(text)
    return Record(kind=fields.pop("kind"), fields=fields, content=content), end


def _crc(text: bytes, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(text))


def segments(run_dir: Path) -> dict[int, Path]:
    """Return the segments of a run's ledger by number, in order; none: it has no ledger."""
    return _numbered(run_dir, _SEGMENT)


def segment(run_dir: Path, number: int) -> Path:
    """Return a segment's path."""
    return run_dir / FOLDER / f"{number:08}.log"


def groups_files(run_dir: Path) -> dict[int, Path]:
    """Return the files of finished groups by wave, in order."""
    return _numbered(run_dir, _GROUPS)


def groups_file(run_dir: Path, wave: int) -> Path:
    """Return the path of a wave's finished groups."""
    return run_dir / FOLDER / f"iteration-{wave:08}.groups"


def step_files(run_dir: Path) -> dict[int, Path]:
    """Return the files of train steps that can be done again, by iteration, in order."""
    return _numbered(run_dir, _STEP)


def step_file(run_dir: Path, iteration: int) -> Path:
    """Return the path of an iteration's train step."""
    return run_dir / FOLDER / f"step-{iteration:08}.redo"


def wave_of_file(path: Path) -> int:
    """Return the wave whose finished groups a file has; 0: its name says none."""
    match = _GROUPS.fullmatch(path.name)
    return 0 if match is None else int(match[1])


def _numbered(run_dir: Path, name: re.Pattern[str]) -> dict[int, Path]:
    folder = run_dir / FOLDER
    found = [(name.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))
