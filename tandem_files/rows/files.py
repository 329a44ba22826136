"""Finds the data files that a path or glob names, and refuses what is none."""

import difflib
import glob
from pathlib import Path

from tandem_files.rows.problems import DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (".json",)
PARQUET_SUFFIXES = (".parquet",)
_KNOWN = ", ".join(JSONL_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES)
_MAGIC = "*?["
_LISTED = 8
# Beginning of a pointer of Git LFS: what a clone without git-lfs has in place of a large file.
_LFS_POINTER = b"version https://git-lfs."


def find_files(path: Path) -> list[Path]:
    """Return the file of a path, or the files that it matches as a glob (`**` included), in alphabetical order.

    Raises: DataError: nothing there, a folder, a suffix that is not known, a git-LFS pointer.
    """
    if not path.exists() and any(sign in str(path) for sign in _MAGIC):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute globs
        files = [file for file in found if file.is_file()]
        if not files:
            raise DataError.of(path, f"matches no file{_beside(_fixed_part(path))}")
    else:
        files = [path]
    for file in files:
        _check(file)
    return files


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a pointer of Git LFS, not the file that it names. Raises: OSError: it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def is_parquet(file: Path) -> bool:
    """Whether a file of a known suffix is Parquet."""
    return file.suffix in PARQUET_SUFFIXES


def is_json(file: Path) -> bool:
    """Whether a file of a known suffix holds rows that may go over several lines: one list of them."""
    return file.suffix in JSON_SUFFIXES


def _check(file: Path) -> None:
    if file.is_dir():
        raise DataError.of(file, f"is a folder{_beside(file)}; name a file, or a glob such as {file.name}/*.jsonl")
    if not file.exists():
        raise DataError.of(file, f"does not exist{_close_to(file)}")
    if not file.is_file():
        raise DataError.of(file, "is not a file")
    if file.suffix not in JSONL_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES:
        packed = ": unpack it first" if file.suffix in (".gz", ".zst", ".bz2", ".xz", ".zip") else ""
        raise DataError.of(file, f"has the suffix {file.suffix!r}; known are {_KNOWN}{packed}")
    try:
        pointer = is_lfs_pointer(file)
    except OSError as error:
        raise DataError.of(file, f"cannot be read: {error.strerror}") from error
    if pointer:
        raise DataError.of(file, "is a git-LFS pointer, not the data: install git-lfs and run `git lfs pull`")


def _fixed_part(path: Path) -> Path:
    """Return the folder above the first part of a glob that has a wildcard."""
    plain = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if any(sign in part for sign in _MAGIC):
            break
        plain /= part
    return plain


def _beside(folder: Path) -> str:
    if not folder.is_dir():
        return f": there is no folder {folder}"
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    shown = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return f": {folder} holds {shown or 'nothing'}"


def _close_to(file: Path) -> str:
    if not file.parent.is_dir():
        return ""
    close = difflib.get_close_matches(file.name, [entry.name for entry in file.parent.iterdir()], 1, 0.8)
    return f": did you mean {close[0]}?" if close else ""
