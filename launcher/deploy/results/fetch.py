"""Copies the files of a run through a pod: each whole and compared by digest, or not at all; resumable by byte."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.deploy.results.helper_pod import CONTAINER
from launcher.deploy.results.selection import CopyResult
from launcher.deploy.running.api import OperatorApi
from launcher.deploy.running.streams import STDERR, STDOUT, answer_of, run_in_pod
from servicekit.errors import ConfigError, DigestMismatch, Unavailable
from tandem_files.atomic import write_json_atomic

# What has come: path -> size and SHA-256. A file of other size or digest is copied again.
RECORD = ".tandem-results.json"
# Smaller files are copied each time: a run changes them, maybe without changing their size.
ALWAYS_BYTES = 1 << 20
_PART = ".part"
_SCRIPT = Path(__file__).with_name("remote.py")
# A stream through an API server breaks now and then; each try continues where the last one ended.
TRIES = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of the run: path below the run's folder, bytes."""

    path: str
    size: int


def list_files(api: OperatorApi, pod: str, root: str, skipped: Sequence[str]) -> list[RemoteFile]:
    """List the files below a folder of a pod. Raises: ConfigError: the folder does not exist; Unavailable."""
    rows = map(json.loads, answer_of(api, pod, CONTAINER, _command("list", root, *skipped)).splitlines())
    return [RemoteFile(path=_safe(str(row["path"])), size=int(row["size"])) for row in rows]


def fetch(
    api: OperatorApi, pod: str, root: str, files: Sequence[RemoteFile], target: Path, say: Callable[[str], None]
) -> CopyResult:
    """Copy files below `root` of a pod into a folder; those that came before, and still match, are kept.

    Raises: DigestMismatch: a file differs from what was sent, again and again; Unavailable; OSError.
    """
    target.mkdir(parents=True, exist_ok=True)
    record, done = _read_record(target), CopyResult()
    for file in files:
        place = target / file.path
        known = record.get(file.path)
        if known is not None and file.size >= ALWAYS_BYTES and known["size"] == file.size and _has(place, known):
            done.kept += 1
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        digest = _fetch_one(api, pod, f"{root}/{file.path}", place)
        record[file.path] = {"size": place.stat().st_size, "sha256": digest}
        write_json_atomic(target / RECORD, record)
        done.files, done.size = done.files + 1, done.size + place.stat().st_size
        say(f"{file.path}  {place.stat().st_size:,} bytes")
    return done


def _fetch_one(api: OperatorApi, pod: str, source: str, place: Path) -> str:
    """Copy a file, in as many tries as it takes. Returns: its digest."""
    part = place.with_name(place.name + _PART)
    pause = threading.Event()
    for attempt in range(1, TRIES + 1):
        have = part.stat().st_size if part.is_file() else 0
        try:
            sent = _receive(api, pod, source, part, have)
        except Unavailable:
            gained = (part.stat().st_size if part.is_file() else 0) > have
            if attempt == TRIES and not gained:
                raise
        else:
            if _digest(part) == sent:
                part.replace(place)
                return sent
            part.unlink()  # written to meanwhile, or damaged on the way: from its beginning
        pause.wait(min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S))
    raise DigestMismatch(f"{source} of pod {pod} could not be copied whole in {TRIES} tries; is it still written to?")


def _receive(api: OperatorApi, pod: str, source: str, part: Path, offset: int) -> str:
    """Append what a file has from an offset on. Returns: the digest of all of it, as the pod computed it."""
    digest = bytearray()
    with part.open("ab") as file:
        for channel, data in run_in_pod(api, pod, CONTAINER, _command("send", source, str(offset))):
            if channel == STDOUT:
                file.write(data)
            elif channel == STDERR:
                digest += data
        file.flush()
        os.fsync(file.fileno())
    return digest.decode(errors="replace").strip()


def _command(*arguments: str) -> list[str]:
    return ["python", "-c", _SCRIPT.read_text(encoding="utf-8"), *arguments]


def _safe(path: str) -> str:
    """Refuse a path that leads out of the folder. Raises: ConfigError."""
    parts = PurePosixPath(path).parts
    if not parts or PurePosixPath(path).is_absolute() or ".." in parts:
        raise ConfigError(f"the pod names a file {path!r}, which is not below the run's folder")
    return path


def _has(place: Path, known: dict[str, object]) -> bool:
    return place.is_file() and place.stat().st_size == known["size"] and _digest(place) == known["sha256"]


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_record(target: Path) -> dict[str, dict[str, object]]:
    """Read what came before; nothing if the record cannot be read, so that all is copied again."""
    try:
        found = json.loads((target / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
