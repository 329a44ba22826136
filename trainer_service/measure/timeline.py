"""What a rank did when: seconds of computing, of communication, and of neither, from spans of time."""

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


def shares(spans: Sequence[Interval], seconds: float) -> Shares:
    """Divide a timeline of `seconds`; spans may overlap, on several streams or threads."""
    compute_s = covered([span for span in spans if not span.communicates])
    busy_s = covered(spans)
    return Shares(
        compute_s=compute_s,
        communication_s=covered([span for span in spans if span.communicates]),
        exposed_s=busy_s - compute_s,
        idle_s=max(0.0, seconds - busy_s),
    )


def covered(spans: Iterable[Interval]) -> float:
    """Return the seconds in which at least one span runs.

    >>> covered([Interval(name="", start_s=a, end_s=b, self_s=0, communicates=False) for a, b in [(0, 2), (1, 3), (5, 6)]])
    4.0
    """
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.start_s):
        total += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return total
