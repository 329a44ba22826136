"""Writes files and folders atomically: a reader sees the old content or the new one. Checks for room before that."""

import contextlib
import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from servicekit.errors import WRITING

# Suffix of a file until it is complete; a crash may leave such a file.
SCRATCH_SUFFIX = r"\.[0-9a-f]{32}\.tmp"
# Suffix of what could not be removed, and is to be removed later (make_way).
LEFT = r"\.left-[0-9a-f]{32}"
# For what else is written meanwhile: rows, state, samples and logs of a run.
SPARE_BYTES = 16 << 20
_MIB = 1 << 20


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
            try:
                temporary.replace(path)
            except FileNotFoundError:  # whoever has taken over has removed it (tandem_files/leader.py)
                before_write()
                raise
        finally:
            temporary.unlink(missing_ok=True)
        if durable:
            sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError name `path`: that of a write to a full disk names nothing, others a temporary file."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary file's, which says nothing
        error.add_note(WRITING)
        raise


def write_json_atomic(
    path: Path, data: Any, before_write: Callable[[], None] = no_check, *, durable: bool = True
) -> None:
    """Write `data` as JSON with write_bytes_atomic. Raises: ValueError: it has NaN or infinity, which JSON has not."""
    text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
    write_bytes_atomic(path, f"{text}\n".encode(), before_write, durable=durable)


def append_json(path: Path, data: Any, before_write: Callable[[], None] = no_check) -> None:
    """Append a line of JSON; it survives the end of the process, and after an fsync a power cut.

    Args:
        before_write: called immediately before the write; if it raises, the file stays as it is.
    Raises: OSError: with the file's name; no part of the line is in it. ValueError: as write_json_atomic.
    """
    line = (json.dumps(data, allow_nan=False) + "\n").encode()
    with naming(path), path.open("ab+", buffering=0) as file:
        before_write()
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):  # a line that a crash has torn ends there
            line = b"\n" + line
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(end)
            raise


class NotRemoved(OSError):
    """Some of the files and folders that were to be removed are still there; all others are gone.

    Attributes:
        left: which, and why, a sentence for each.
    """

    def __init__(self, left: list[str]) -> None:
        super().__init__("; ".join(left))
        self.left = left


def remove_each(paths: Iterable[Path], before_write: Callable[[], None] = no_check, *, first: str = "") -> list[str]:
    """Remove files, links and folders, as far as possible.

    Args:
        before_write: called immediately before each is removed; if it raises, that one stays. So does what has taken
            its name meanwhile.
        first: what is removed first of a folder; while it cannot be, the rest stays.
    Returns: for each that is left, what holds it, and why.
    """
    left: list[str] = []
    for path in paths:
        errors: list[str] = []

        def note(_: object, name: str, info: Any, path: Path = path, errors: list[str] = errors) -> None:
            if not isinstance(info[1], FileNotFoundError):  # another process removes it too
                errors.append(f"{path / name}: {info[1].strerror or info[1]}")

        try:
            if path.is_dir() and not path.is_symlink():
                _remove_folder(path, before_write, first, note)
            else:
                inode = path.lstat().st_ino
                before_write()
                if path.lstat().st_ino == inode:
                    path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            errors.append(f"{path}: {error.strerror or error}")
        left += errors[:1]  # those after it follow from it
    return left


def _remove_folder(
    folder: Path, before_write: Callable[[], None], first: str, note: Callable[[object, str, Any], None]
) -> None:
    """Remove a folder by its inode. Raises: OSError: it cannot be opened, or is not empty in the end."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        before_write()
        for name in sorted(os.listdir(opened), key=lambda name: name != first):  # noqa: PTH208 - by its inode
            try:
                if stat.S_ISDIR(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
                    shutil.rmtree(name, onerror=note, dir_fd=opened)
                else:
                    os.unlink(name, dir_fd=opened)
            except OSError as error:
                note(os.unlink, name, (type(error), error, None))
                if name == first:
                    return
        if os.path.samestat(os.fstat(opened), folder.stat()):  # else it has been made anew
            folder.rmdir()
    finally:
        os.close(opened)


def make_way(path: Path, before_write: Callable[[], None] = no_check) -> None:
    """Remove what is at `path`; rename it, if something in it cannot be removed, to a name that LEFT matches.

    Args:
        before_write: as in remove_each.
    Raises: OSError: it can be neither removed nor renamed.
    """
    if remove_each([path], before_write):
        before_write()
        path.rename(path.with_name(f".{path.name.removeprefix('.')}.left-{uuid.uuid4().hex}"))


def replace_folder(finished: Path, folder: Path) -> None:
    """Replace `folder` by a finished folder on the same file system, durably.

    A rename cannot replace a folder that has files, so the old folder is renamed first, then removed.
    """
    old = folder.with_name(f".{folder.name}.old")
    make_way(old)
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


def check_room(folder: Path, num_bytes: int) -> None:
    """Check that files of so many bytes fit into a folder, and the run's small files besides.

    Args:
        folder: it or one of its parents exists.
    Raises: OSError: ENOSPC, with what is needed and free; or the file system does not answer.
    """
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, needed = shutil.disk_usage(parent).free, num_bytes + SPARE_BYTES
    if free < needed:
        why = f"{needed / _MIB:,.0f} MiB are needed, {free / _MIB:,.0f} MiB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {why}", str(folder))
