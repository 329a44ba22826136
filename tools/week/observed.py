"""What a coordinator takes, looked at every so many iterations, and the verdict whether that is flat."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import psutil

from tandem_files.metrics_file import METRICS_FILE
from tandem_files.samples.folder import SAMPLES_FOLDER

_MIB = 2**20
# The first part of a run fills caches, and histories that have a bound.
WARM = 0.1
# What halves of a flat run may differ by: on a busy machine, medians of processor time by less than a fifth.
MOST_SECONDS, MOST_BYTES, MOST_DESCRIPTORS = 1.25, 1.05, 4
# Growth of memory that is no leak: arenas of allocators that are not given back. In 350 iterations 23 KiB of each.
MOST_MIB = 8.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """The coordinator after some iterations, and what the ones since the look before took.

    Attributes:
        iteration_s: median by the rows; `cpu_s` the mean of its processor's seconds an iteration.
        written_bytes: of an iteration, by all writes to files and pipes.
        folder_bytes, num_files: of the run's folder now, without stored samples, of which there are `num_stored` files.
    """

    iteration: int
    iteration_s: float
    cpu_s: float
    rss_mib: float
    descriptors: int
    threads: int
    written_bytes: float
    row_bytes: float
    folder_bytes: int
    num_files: int
    num_stored: int


@dataclass(kw_only=True)
class Observer:
    """Looks at a run from outside of it.

    Args:
        every: iterations between two looks.
    """

    process: psutil.Process
    run_dir: Path
    every: int
    looks: list[Look] = field(default_factory=list)
    iteration: int = 0

    def __post_init__(self) -> None:
        self._seconds: list[float] = []
        self._at = 0
        self._before = (0, 0.0, 0, 0)  # iteration, processor seconds, bytes written, bytes of rows

    def look(self) -> None:
        """Read the new rows; where enough came, look at the process. Raises: psutil.Error: it has ended."""
        path = self.run_dir / METRICS_FILE
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
        lines = content[: content.rfind(b"\n") + 1]
        self._at += len(lines)
        rows = [json.loads(line) for line in lines.splitlines()]
        self._seconds += [row["iteration_s"] for row in rows if row["iteration"]]
        self.iteration = rows[-1]["iteration"] if rows else self.iteration
        if self.iteration - self._before[0] >= self.every:
            self._note()

    def _note(self) -> None:
        times, written = self.process.cpu_times(), self.process.io_counters().write_chars
        number, cpu_s = self.iteration - self._before[0], times.user + times.system
        stored = list((self.run_dir / SAMPLES_FOLDER).glob("*"))
        others = list(_files_of(self.run_dir))
        one = Look(
            iteration=self.iteration,
            iteration_s=median(self._seconds),
            cpu_s=(cpu_s - self._before[1]) / number,
            rss_mib=self.process.memory_info().rss / _MIB,
            descriptors=self.process.num_fds(),
            threads=self.process.num_threads(),
            written_bytes=(written - self._before[2]) / number,
            row_bytes=(self._at - self._before[3]) / number,
            folder_bytes=sum(_size(path) for path in others),
            num_files=len(others),
            num_stored=len(stored),
        )
        self.looks.append(one)
        print(json.dumps(asdict(one)), flush=True)
        self._seconds = []
        self._before = (self.iteration, cpu_s, written, self._at)


def _files_of(run_dir: Path) -> Iterator[Path]:
    """Yield the files of a run's folder but stored samples; what is removed meanwhile is left out."""
    for folder, names, files in os.walk(run_dir):
        names[:] = [name for name in names if name != SAMPLES_FOLDER]
        yield from (Path(folder, name) for name in files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # removed meanwhile
        return 0


def problems(looks: Sequence[Look]) -> list[str]:
    """Compare the two halves of a run, without its warm-up; what has grown is named."""
    warm = [one for one in looks if one.iteration > WARM * looks[-1].iteration]
    first, second = warm[: len(warm) // 2], warm[len(warm) // 2 :]
    if not first:
        return [f"{len(looks)} looks are too few to compare halves"]
    found = []
    for name in ("cpu_s", "iteration_s"):
        before, after = _median(first, name), _median(second, name)
        if after > MOST_SECONDS * before:
            found.append(f"{name} grew from {before:.4f} to {after:.4f}")
    for name in ("written_bytes", "row_bytes"):
        before, after = _median(first, name), _median(second, name)
        if after > MOST_BYTES * before:
            found.append(f"{name} of an iteration grew from {before:,.0f} to {after:,.0f}")
    before, after = _median(first, "rss_mib"), _median(second, "rss_mib")
    if after - before > MOST_MIB:
        found.append(f"memory grew from {before:.0f} to {after:.0f} MiB")
    for name in ("descriptors", "threads", "num_files"):
        before, after = _median(first, name), _median(second, name)
        if after - before > MOST_DESCRIPTORS:
            found.append(f"{name} grew from {before:g} to {after:g}")
    return found


def _median(looks: Sequence[Look], name: str) -> float:
    return float(median([getattr(one, name) for one in looks]))


def table(looks: Sequence[Look]) -> str:
    """The looks as a table of Markdown."""
    lines = [
        "| iteration | median s | processor s | RSS MiB | descriptors | threads | written B | row B | folder MiB "
        "| files | stored |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.iteration:,} | {one.iteration_s:.4f} | {one.cpu_s:.4f} | {one.rss_mib:.0f} | {one.descriptors} "
        f"| {one.threads} | {one.written_bytes:,.0f} | {one.row_bytes:,.0f} | {one.folder_bytes / _MIB:.0f} "
        f"| {one.num_files} | {one.num_stored} |"
        for one in looks
    ]
    return "\n".join(lines)
