"""Temporary folders with an owner, so that the next start removes those of processes that were killed.

The owner holds a lock on a file in its folder for as long as it lives: the kernel releases it, whatever ends the
process, and it is valid across the containers of a host, where a process id is not.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

_LOCK = "owner.lock"
# Lists files outside of the folder that are removed with it.
_BESIDE = "beside.txt"
_SHARED_MEMORY = Path("/dev/shm")


class OwnedFolder:
    """A new folder for its user alone, until remove()."""

    def __init__(self, prefix: str, parent: Path | str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def note(self, files: Iterable[Path]) -> None:
        """Record files in /dev/shm that are removed with the folder."""
        (self.path / _BESIDE).write_text("".join(f"{path}\n" for path in files), encoding="utf-8")

    def remove(self) -> None:
        """Remove the folder and the recorded files; may be called twice."""
        _remove(self.path)
        self._lock.close()


def remove_orphans(prefix: str, parent: Path | str | None = None) -> list[Path]:
    """Remove this user's folders of this prefix whose owner has died. Returns: the removed folders."""
    removed = []
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process removes it, or it is not ours
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("r+") as lock:  # FileNotFoundError: not made by us, or only just
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
                removed.append(folder)
    return removed


def _remove(folder: Path) -> None:
    beside = folder / _BESIDE
    for path in map(Path, beside.read_text(encoding="utf-8").splitlines() if beside.is_file() else ()):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            if path.parent == _SHARED_MEMORY and path.lstat().st_uid == os.geteuid():
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def shared_memory_of(pids: Iterable[int], *prefixes: str) -> list[Path]:
    """Find the files in /dev/shm of these prefixes that these processes have mapped or opened."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            names |= {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
            names |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    starts = tuple(f"{_SHARED_MEMORY}/{prefix}" for prefix in prefixes)
    return sorted(Path(name) for name in names if name.startswith(starts))
