"""Which replicas are stuck, and how many of them may be evicted. Pure: time comes from the caller.

A replica is stuck when it has not answered, or has had work without computing a token, for `stuck_after_s`: one whose
completions take long is not. One that is paused, unseeded or without work is not either, nor is a process that has
ended: its record goes with its lease, and the kubelet starts it again.
"""

from collections import deque
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Vital:
    """What a replica says of itself: whether it generates, and a number that changes as its engine computes tokens."""

    is_generating: bool
    progress: int


@dataclass(kw_only=True)
class _Since:
    """Since when a replica has done nothing, and what it was at then."""

    start_s: float
    progress: int | None
    is_silent: bool


class StuckDetector:
    """Told again and again how each replica is; keys are incarnations."""

    def __init__(self, stuck_after_s: float) -> None:
        self._stuck_after_s = stuck_after_s
        self._since: dict[object, _Since] = {}

    def observe(self, key: object, vital: Vital | None, now_s: float) -> str:
        """Take in what a replica said, None: nothing. Returns: why it is stuck, "" if it is not."""
        since = self._since.get(key)
        is_silent = vital is None
        progress = None if vital is None else vital.progress
        rests = vital is not None and not vital.is_generating
        if rests or since is None or since.is_silent != is_silent or since.progress != progress:
            self._since[key] = _Since(start_s=now_s, progress=progress, is_silent=is_silent)
            return ""
        if now_s - since.start_s < self._stuck_after_s:
            return ""
        what = "no answer" if is_silent else "no token computed"
        # Not how long exactly: what is told again and again must be the same text.
        return f"{what} in {self._stuck_after_s:g} s"

    def keep(self, keys: set[object]) -> None:
        """Forget all others."""
        self._since = {key: since for key, since in self._since.items() if key in keys}


class HourlyBudget:
    """At most so many within any hour."""

    def __init__(self, per_hour: int) -> None:
        self.per_hour = per_hour
        self._spent_s: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """Take one. Returns: whether there was one."""
        while self._spent_s and now_s - self._spent_s[0] >= HOUR_S:
            self._spent_s.popleft()
        if len(self._spent_s) >= self.per_hour:
            return False
        self._spent_s.append(now_s)
        return True

    def give_back(self) -> None:
        """The last one was not used."""
        self._spent_s.pop()
