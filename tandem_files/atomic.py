"""Writes files and folders atomically: a reader sees the old content or the new one."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Suffix of a file until it is complete; a crash may leave such a file.
SCRATCH_SUFFIX = r"\.[0-9a-f]{32}\.tmp"


def no_check() -> None:
    """Check nothing: the default of `before_write`."""


def write_bytes_atomic(
    path: Path, content: bytes, before_write: Callable[[], None] = no_check, *, durable: bool = True
) -> None:
    """Replace `path`, whose folder must exist; a reader, even after a power cut, sees the old or the new content.

    Args:
        before_write: called immediately before the replacement; if it raises, the old content stays.
        durable: force the content to disk, which costs 5-10 ms. Without it, a power cut may lose old and new content.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with naming(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            before_write()
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if durable:
            sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError without a file name, e.g. that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_json_atomic(
    path: Path, data: Any, before_write: Callable[[], None] = no_check, *, durable: bool = True
) -> None:
    """Write `data` as JSON with write_bytes_atomic. Raises: ValueError: it has NaN or infinity, which JSON has not."""
    text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
    write_bytes_atomic(path, f"{text}\n".encode(), before_write, durable=durable)


def replace_folder(finished: Path, folder: Path) -> None:
    """Replace `folder` by a finished folder on the same file system, durably.

    A rename cannot replace a folder that has files, so the old folder is renamed first, then removed.
    """
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    finished.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Force the content of a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force names that were just created, renamed or removed in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
