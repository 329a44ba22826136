"""Which folders a request may name: below the run's own, and to replace one, only what we have written there.

A service runs with all the rights of its user; a request must not be able to use them on other files.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from servicekit.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a folder that we have written looks like.

    name: in words, for errors. mark: a file that it always has; "": none. entry: all that it may hold, as a pattern; no
    folders.
    """

    name: str
    mark: str
    entry: re.Pattern[str]

    def is_in(self, folder: Path) -> bool:
        """Whether this is such a folder, not a link to one; an empty one counts. Raises: OSError."""
        if folder.is_symlink() or not folder.is_dir():
            return False
        entries = list(folder.iterdir())
        ours = all(self.entry.fullmatch(each.name) and each.is_file() and not each.is_symlink() for each in entries)
        return not entries or (ours and (not self.mark or (folder / self.mark).is_file()))


def inside(path: str, root: Path, what: str, *, or_itself: bool = False) -> Path:
    """The folder that a request names, which need not exist.

    Args:
        root: folder that it must be below, links resolved; what: the field, for errors ("path").
        or_itself: it may be `root`.
    Raises: InvalidRequest: it is relative, elsewhere, or behind a file.
    """
    folder = Path(path)
    if not folder.is_absolute():
        raise InvalidRequest(f"{what} {path!r} is not absolute; services have different working directories")
    try:
        real, home = folder.resolve(), root.resolve()
        if not (home in real.parents or (or_itself and real == home)):
            raise InvalidRequest(f"{what} {path!r} is not below {home}, the only folder that requests may name here")
        for each in (real, *real.parents):
            if each.exists():
                if not each.is_dir():
                    raise InvalidRequest(f"{what} {path!r}: {each} is a file")
                break
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero in it, links in a circle
        raise InvalidRequest(f"{what} {path!r} is no folder's name: {error}") from None
    return real


def replaceable(path: str, root: Path, what: str, written: Written) -> Path:
    """The same, of a folder that is about to be written, or replaced.

    Raises: InvalidRequest: also if something is there that is not `written`.
    """
    folder = inside(path, root, what)
    try:
        free = not folder.exists() or written.is_in(folder)
    except OSError as error:
        raise InvalidRequest(f"{what} {path!r} cannot be looked into: {error}") from None
    if not free:
        raise InvalidRequest(f"{what} {path!r} holds something else than {written.name}; it is not replaced")
    return folder
