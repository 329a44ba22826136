"""Recognises pointers of Git LFS: what a clone without git-lfs has in place of large files."""

from pathlib import Path

_BEGINNING = b"version https://git-lfs."


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a pointer, not the file that it names. Raises: OSError: it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
