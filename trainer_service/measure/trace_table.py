"""Makes the table of a profiled step from its trace, in a process of its own: it takes tens of microseconds an event.

`python -m trainer_service.measure.trace_table TRACE FIELDS`: TRACE is torch.profiler's, as text; FIELDS are those of
the RankProfile that the trace does not have, as JSON, with `run_dir`. Writes the table and the packed trace; it goes.
"""

import gzip
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem_files.profiles.folder import Operator, RankProfile, trace_path, write_profile

# Operators of a table.
MOST_OPERATORS = 40
_COMPUTES = "aten::"  # on a host; what calls such an operator (autograd's nodes, modules) is counted by it
_COMMUNICATES = ("c10d::", "gloo:", "nccl:", "nccldevkernel", "ncclkernel")
# Categories of a trace's events, by where the timeline is.
_CATEGORIES = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op", "user_annotation")}
_US = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An operator or a kernel while it ran.

    Attributes:
        self_s: its seconds without those of the operators that it called.
        communicates: it is a collective or a message.
    """

    name: str
    start_s: float
    end_s: float
    self_s: float
    communicates: bool


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Seconds of a timeline; compute_s + exposed_s + idle_s is its length."""

    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float


def intervals_of(events: Iterable[Mapping[str, Any]], timeline: str) -> list[Interval]:
    """Choose what counts of a trace's events: the device's kernels and copies, or the host's operators.

    Args:
        events: of torch's trace: complete ones (ph X) have cat, name, tid, and ts and dur in microseconds.
        timeline: "cuda" or "cpu".
    """
    mine = [event for event in events if event.get("ph") == "X" and event.get("cat") in _CATEGORIES[timeline]]
    inside = [0.0] * len(mine)  # of each event, the microseconds of the events that it called
    if timeline == "cpu":
        mine.sort(key=lambda event: (event["tid"], event["ts"], -event["dur"]))
        callers: list[int] = []
        for place, event in enumerate(mine):
            while callers and not _within(event, mine[callers[-1]]):
                callers.pop()
            if callers:
                inside[callers[-1]] += event["dur"]
            callers.append(place)
    intervals = []
    for event, inner in zip(mine, inside, strict=True):
        communicates = event["name"].lower().startswith(_COMMUNICATES)
        if not (communicates or timeline == "cuda" or event["name"].startswith(_COMPUTES)):
            continue
        start_s, seconds = event["ts"] * _US, event["dur"] * _US
        self_s = seconds if communicates else seconds - inner * _US
        intervals.append(
            Interval(
                name=event["name"],
                start_s=start_s,
                end_s=start_s + seconds,
                self_s=self_s,
                communicates=communicates,
            )
        )
    return intervals


def shares(intervals: Sequence[Interval], seconds: float) -> Shares:
    """Divide a timeline of `seconds`; intervals may overlap, on several streams or threads."""
    computing = [(one.start_s, one.end_s) for one in intervals if not one.communicates]
    communicating = [(one.start_s, one.end_s) for one in intervals if one.communicates]
    compute_s, busy_s = _covered(computing), _covered([*computing, *communicating])
    return Shares(
        compute_s=compute_s,
        communication_s=_covered(communicating),
        exposed_s=busy_s - compute_s,
        idle_s=max(0.0, seconds - busy_s),
    )


def _covered(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the length of what lies between at least one pair of a start and an end.

    >>> _covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for start_s, end_s in sorted(pairs):
        total += max(0.0, end_s - max(start_s, until))
        until = max(until, end_s)
    return total


def _within(event: Mapping[str, Any], caller: Mapping[str, Any]) -> bool:
    return bool(event["tid"] == caller["tid"] and event["ts"] < caller["ts"] + caller["dur"])


def operators(intervals: Iterable[Interval]) -> list[Operator]:
    """Add up intervals by name, longest first."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for one in intervals:
        calls[one.name] += 1
        seconds[one.name] += one.self_s
    names = sorted(seconds, key=lambda name: -seconds[name])
    return [Operator(name=name, calls=calls[name], seconds=seconds[name]) for name in names]


def main(arguments: list[str]) -> None:
    """Write the files. Raises: OSError, ValueError: they cannot be written, or TRACE is no trace."""
    os.nice(10)  # the trainer's own threads go first
    trace, fields = Path(arguments[0]), json.loads(arguments[1])
    run_dir = Path(fields.pop("run_dir"))
    try:
        events = json.loads(trace.read_bytes())["traceEvents"]
        intervals = intervals_of(events, fields["timeline"])
        profile = RankProfile(
            **fields,
            operators=tuple(operators(intervals)[:MOST_OPERATORS]),
            **asdict(shares(intervals, fields["recorded_s"])),
        )
        with trace.open("rb") as text, gzip.open(trace_path(run_dir, profile.step, profile.rank), "wb", 5) as packed:
            shutil.copyfileobj(text, packed)
        write_profile(run_dir, profile)
    finally:
        trace.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
