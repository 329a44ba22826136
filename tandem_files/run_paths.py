"""Limits the folders that a request may name: below the run's folder, and replaced only if a service wrote them.

A service has all rights of its user; a request must not be able to use them on other files.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from servicekit.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class FolderKind:
    """The contents of a folder that a service writes, by which it is recognised.

    Attributes:
        name: of the kind, for errors.
        mark: a file that it always has; "": none.
        entry: pattern of the files that it may have.
        folders: names of the folders that it may have, which hold such files only.
    """

    name: str
    mark: str
    entry: re.Pattern[str]
    folders: frozenset[str] = frozenset()

    def is_in(self, folder: Path) -> bool:
        """Whether `folder` is of this kind, or empty; a link to such a folder is not. Raises: OSError."""
        if folder.is_symlink() or not folder.is_dir():
            return False
        entries = list(folder.iterdir())
        below = [path for inner in entries if inner.name in self.folders for path in _files_in(inner)]
        files = [path for path in entries if path.name not in self.folders] + below
        ours = all(self.entry.fullmatch(path.name) and path.is_file() and not path.is_symlink() for path in files)
        return not entries or (ours and (not self.mark or (folder / self.mark).is_file()))


def _files_in(folder: Path) -> list[Path]:
    """List a folder; what is none, or a link, is returned itself."""
    return [folder] if folder.is_symlink() or not folder.is_dir() else list(folder.iterdir())


def inside(path: str, root: Path, what: str, *, or_itself: bool = False) -> Path:
    """Check the folder that a request names; it need not exist.

    Args:
        root: folder that it must be below, links resolved.
        what: field of the request, for errors.
        or_itself: it may be `root` itself.
    Returns: the folder, links resolved.
    Raises: InvalidRequest: it is relative, not below `root`, or below a file.
    """
    folder = Path(path)
    if not folder.is_absolute():
        raise InvalidRequest(f"{what} {path!r} is not absolute; services have different working directories")
    try:
        real, home = folder.resolve(), root.resolve()
        if not (home in real.parents or (or_itself and real == home)):
            raise InvalidRequest(f"{what} {path!r} is not below {home}, the only folder that requests may name here")
        for parent in (real, *real.parents):
            if parent.exists():
                if not parent.is_dir():
                    raise InvalidRequest(f"{what} {path!r}: {parent} is a file")
                break
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, a cycle of links
        raise InvalidRequest(f"{what} {path!r} cannot be a folder: {error}") from None
    return real


def replaceable(path: str, root: Path, what: str, kind: FolderKind) -> Path:
    """Check, as `inside`, a folder that is about to be written or replaced.

    Raises: InvalidRequest: as `inside`, or it exists and is not of this kind.
    """
    folder = inside(path, root, what)
    try:
        free = not folder.exists() or kind.is_in(folder)
    except OSError as error:
        raise InvalidRequest(f"{what} {path!r} cannot be listed: {error}") from None
    if not free:
        raise InvalidRequest(f"{what} {path!r} holds something else than {kind.name}; it is not replaced")
    return folder
