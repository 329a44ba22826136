"""Shows the progress of a `pip install`: a line per large download, per 40 packages, and when it is slow.

    python -m pip install ... 2>&1 | python -m tools.pip_progress LOG

pip itself prints nothing, or a line for each of 160 packages and for every index without it. Its output is copied to
the file LOG. Uses the standard library only: it runs before anything is installed.
"""

import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

PACKAGES = 40
LARGE_MB = 100.0
SILENCE_S = 15.0
_MEGABYTES = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
_FETCHED = re.compile(
    r"\s*(?:Downloading|Using cached|Processing) (\S+?\.whl)(?:\.metadata)?(?: \(([\d.]+) (kB|MB|GB)\))?"
)
_INSTALLS = re.compile(r"Installing collected packages: (.*)")


class Progress:
    """Condenses pip's output into a few lines, printed with `report`."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._packages: set[str] = set()
        self._doing = "asking the package index"
        self._silences = 0

    def read_line(self, line: str) -> None:
        """Process one line of pip's output."""
        self._silences = 0
        if found := _FETCHED.match(line):
            self._fetches(found[1].rpartition("/")[2], float(found[2] or 0) * _MEGABYTES.get(found[3], 0.0))
        elif found := _INSTALLS.match(line):
            self._doing = f"unpacking {len(found[1].split(','))} packages"
            self._report(self._doing)

    def _fetches(self, wheel: str, size_mb: float) -> None:
        name = "-".join(wheel.split("-")[:2])
        if name not in self._packages:
            self._packages.add(name)
            if len(self._packages) % PACKAGES == 0 and size_mb < LARGE_MB:
                self._report(f"{len(self._packages)} packages fetched")
        if size_mb >= LARGE_MB:
            self._report(f"fetching {name}, {size_mb:.0f} MB")
        self._doing = f"fetching {name}"

    def silent(self, seconds: float) -> None:
        """Count another `seconds` without output, and report 1, 2, 4, 8, ... of them."""
        self._silences += 1
        if self._silences.bit_count() == 1:
            self._report(f"still {self._doing} ({self._silences * seconds:.0f} s)")


def lines_or_silence(source: Iterable[str], silence_s: float) -> Iterator[str | None]:
    """Yield the lines of `source` as they come, and None whenever none came for `silence_s` seconds."""
    lines: queue.Queue[tuple[str | None, bool]] = queue.Queue()

    def read() -> None:
        for line in source:
            lines.put((line, False))
        lines.put((None, True))

    threading.Thread(target=read, name="read pip", daemon=True).start()
    while True:
        try:
            line, ended = lines.get(timeout=silence_s)
        except queue.Empty:
            yield None
            continue
        if ended:
            return
        yield line


def follow(source: Iterable[str], log: TextIO, report: Callable[[str], None], silence_s: float = SILENCE_S) -> None:
    """Copy what pip prints into `log`, and report its progress with `report`."""
    progress = Progress(report)
    for line in lines_or_silence(source, silence_s):
        if line is None:
            progress.silent(silence_s)
        else:
            log.write(line)
            log.flush()
            progress.read_line(line)


def main(arguments: list[str]) -> int:
    """Follow standard input. Returns: 0, or 2 for wrong usage."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with Path(arguments[0]).open("w", encoding="utf-8") as log:
        follow(sys.stdin, log, lambda text: print(f"venv:   {text}", flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
