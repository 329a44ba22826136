"""Small file systems, to fill them."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Make a folder a file system of a size that mount knows ("4m"); skip the test where that is not allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: a test that failed may have left processes in it for a moment.
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> None:
    """Take every byte that is left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
