"""Files that are either there completely or not at all."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What a file that is being written has behind its name until it is complete; a crash may leave it.
SCRATCH_SUFFIX = r"\.[0-9a-f]{32}\.tmp"


def nothing_more() -> None:
    """No last look before a write."""


def write_bytes_atomic(
    path: Path, content: bytes, last_look: Callable[[], None] = nothing_more, *, durable: bool = True
) -> None:
    """Replaces `path`: a reader, also one after a power cut, sees the old or the new content. Its folder must exist.

    Args:
        last_look: called in the moment before; what it raises leaves the old content.
        durable: force it to disk, which costs 5-10 ms. Without, a power cut may lose the content, old and new.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with naming(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            last_look()
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if durable:
            sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """What fails inside names `path`: a write to a full disk says only that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_json_atomic(
    path: Path, data: Any, last_look: Callable[[], None] = nothing_more, *, durable: bool = True
) -> None:
    """Like write_bytes_atomic, of a JSON text. Raises: ValueError: NaN or infinity, which JSON does not have."""
    text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
    write_bytes_atomic(path, f"{text}\n".encode(), last_look, durable=durable)


def replace_folder(finished: Path, folder: Path) -> None:
    """Puts a finished folder in the place of `folder`, for good: a rename cannot replace a folder that has files in it,
    so the older one steps aside first and is removed. Both are on one file system."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    finished.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes names that were just created, renamed or removed in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
