"""Checks before a large write that the file system has room for it."""

import errno
import os
import shutil
from pathlib import Path

# For what else is written meanwhile: rows, state, samples and logs of a run.
SPARE_BYTES = 16 << 20
_MIB = 1 << 20


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
