"""Which files of a run are its results, and how many were copied."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_CHECKPOINTS = "checkpoints"


@dataclass(kw_only=True)
class CopyResult:
    """Files that were copied, and their bytes; files that were kept."""

    files: int = 0
    size: int = 0
    kept: int = 0


def is_chosen(path: str, only: Sequence[str]) -> bool:
    """Return whether a file is, or is below, what is named; any is, if nothing is.

    >>> [is_chosen("hf/config.json", only) for only in ([], ["hf"], ["h"])]
    [True, True, False]
    """
    return not only or any(PurePosixPath(path).is_relative_to(name) for name in only)


def skipped_folders(*, checkpoints: bool) -> list[str]:
    """Return the folders that are none, unless asked for."""
    return [] if checkpoints else [_CHECKPOINTS]
