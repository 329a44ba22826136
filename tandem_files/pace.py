"""Estimates how long a run still takes, from its rows."""

from collections.abc import Mapping, Sequence
from statistics import median

# Newest iterations that count: a run's pace changes with the length of its completions.
_RECENT = 20


def remaining_s(
    rows: Sequence[Mapping[str, float | None]], total: int, *, evaluate_every: int, checkpoint_every: int
) -> float | None:
    """Estimate the seconds until iteration `total` has ended; None without rows.

    Iterations take the median of the recent ones, without what does not belong to each of them; evaluations and
    checkpoints take their own medians, each time that one is due. A single slow iteration so changes nothing.

    Args:
        rows: rows of metrics.jsonl, the newest last.
    """
    recent = rows[-_RECENT:]
    busy = [
        iteration_s - (row.get("evaluate_s") or 0.0) - (row.get("checkpoint_s") or 0.0)
        for row in recent
        if (iteration_s := row.get("iteration_s")) is not None
    ]
    if not busy:
        return None
    done = int(rows[-1].get("iteration") or 0)
    due = range(done + 1, total + 1)
    estimate = median(busy) * len(due)
    for part, every in (("evaluate_s", evaluate_every), ("checkpoint_s", checkpoint_every)):
        seconds = [value for row in recent if (value := row.get(part))]
        if seconds:
            estimate += median(seconds) * sum(number % every == 0 or number == total for number in due)
    return estimate


def clock(seconds: float) -> str:
    """Write a duration in at most 7 characters.

    >>> [clock(seconds) for seconds in (4.2, 83, 3725, 90_000, 900_000)]
    ['0:04', '1:23', '1:02:05', '1d 01h', '10d 10h']
    """
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
