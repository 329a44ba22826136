"""Detects stuck replicas, and limits how many may be evicted; times are arguments.

A replica is stuck if it has not answered for `stuck_after_s`, or has had work without computing a token. One that is
slow, paused, unseeded or without work is not stuck, nor is a process that has ended: its record expires with its lease,
and the kubelet starts it again.
"""

from collections import deque
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Vital:
    """Progress of a replica: whether it generates, and a number that changes when its engine computes tokens."""

    is_generating: bool
    progress: int


@dataclass(kw_only=True)
class _Since:
    """Since when a replica has made no progress, and its progress then."""

    start_s: float
    progress: int | None
    is_silent: bool


class StuckDetector:
    """Detects stuck replicas from repeated observations; keys are incarnations."""

    def __init__(self, stuck_after_s: float) -> None:
        self._stuck_after_s = stuck_after_s
        self._since: dict[object, _Since] = {}

    def observe(self, key: object, vital: Vital | None, now_s: float) -> str:
        """Record an observation. vital: None: no answer. Returns: why the replica is stuck; "" if it is not."""
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
        # Without the exact time, since a trouble is reported once per text.
        return f"{what} in {self._stuck_after_s:g} s"

    def keep(self, keys: set[object]) -> None:
        """Forget all replicas but these."""
        self._since = {key: since for key, since in self._since.items() if key in keys}


class HourlyBudget:
    """A budget of `per_hour` uses within any hour."""

    def __init__(self, per_hour: int) -> None:
        self.per_hour = per_hour
        self._spent_s: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """Take one use. Returns: whether there was one."""
        while self._spent_s and now_s - self._spent_s[0] >= HOUR_S:
            self._spent_s.popleft()
        if len(self._spent_s) >= self.per_hour:
            return False
        self._spent_s.append(now_s)
        return True

    def give_back(self) -> None:
        """Return the last use, which was not needed."""
        self._spent_s.pop()
