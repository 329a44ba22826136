"""What a rank did when: seconds of computing, of communication, and of neither, from intervals of time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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


def shares(intervals: Sequence[Interval], seconds: float) -> Shares:
    """Divide a timeline of `seconds`; intervals may overlap, on several streams or threads."""
    computing = [(one.start_s, one.end_s) for one in intervals if not one.communicates]
    communicating = [(one.start_s, one.end_s) for one in intervals if one.communicates]
    compute_s, busy_s = covered(computing), covered([*computing, *communicating])
    return Shares(
        compute_s=compute_s,
        communication_s=covered(communicating),
        exposed_s=busy_s - compute_s,
        idle_s=max(0.0, seconds - busy_s),
    )


def covered(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the length of what lies between at least one pair of a start and an end.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for start_s, end_s in sorted(pairs):
        total += max(0.0, end_s - max(start_s, until))
        until = max(until, end_s)
    return total
