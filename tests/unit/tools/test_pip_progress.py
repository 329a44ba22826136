"""`make venv` says what it is at: large downloads, every so many packages, and that it is still there."""

import io
import threading
from collections.abc import Iterator

from tools.pip_progress import PACKAGES, follow

ONE = "Collecting torch==2.13.0\n  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)\n"


def said(lines: list[str]) -> list[str]:
    """What the user sees of pip's lines."""
    seen: list[str] = []
    follow(lines, io.StringIO(), seen.append)
    return seen


def test_a_large_download_is_named() -> None:
    assert said(ONE.splitlines(keepends=True)) == ["fetching torch-2.13.0, 527 MB"]


def test_small_ones_are_counted() -> None:
    small = [f"  Downloading p{i}-1.0-py3-none-any.whl (12 kB)\n" for i in range(2 * PACKAGES)]
    assert said(small) == [f"{PACKAGES} packages fetched", f"{2 * PACKAGES} packages fetched"]


def test_files_on_this_disk_and_in_the_cache_count_too() -> None:
    lines = [
        "Processing /w/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl\n",
        "  Using cached b-1-py3-none-any.whl\n",
    ]
    assert said(lines * PACKAGES) == []
    assert said(["Installing collected packages: a, b, c\n"]) == ["unpacking 3 packages"]


def test_silence_is_told_ever_more_rarely() -> None:
    told = threading.Event()
    seen: list[str] = []

    def say(text: str) -> None:
        seen.append(text)
        if len(seen) == 4:
            told.set()

    def pip() -> Iterator[str]:
        yield ONE.splitlines(keepends=True)[1]
        assert told.wait(20)

    follow(pip(), io.StringIO(), say, silence_s=0.25)
    assert seen[1:4] == [f"still fetching torch-2.13.0 ({seconds} s)" for seconds in (0, 0, 1)]


def test_all_that_pip_said_is_kept() -> None:
    log = io.StringIO()
    follow(["ERROR: no\n", "why\n"], log, lambda text: None)
    assert log.getvalue() == "ERROR: no\nwhy\n"
