"""Detects replicas that do not answer, and limits how many may be evicted; times are arguments.

A replica whose engine stands still ends itself (rollout.stall_timeout_s). One that is slow, paused, unseeded or without
work is not stuck, nor is a process that has ended: its record expires with its lease, and the kubelet starts it again.
"""

from collections import deque

HOUR_S = 3600.0


class StuckDetector:
    """Detects stuck replicas from repeated observations; keys are incarnations."""

    def __init__(self, stuck_after_s: float) -> None:
        self._stuck_after_s = stuck_after_s
        self._silent_since_s: dict[object, float] = {}

    def observe(self, key: object, answers: bool, now_s: float) -> str:
        """Record an observation. Returns: why the replica is stuck; "" if it is not."""
        if answers:
            self._silent_since_s.pop(key, None)
            return ""
        since_s = self._silent_since_s.setdefault(key, now_s)
        # Without the exact time, since a trouble is reported once per text.
        return f"no answer in {self._stuck_after_s:g} s" if now_s - since_s >= self._stuck_after_s else ""

    def keep(self, keys: set[object]) -> None:
        """Forget all replicas but these."""
        self._silent_since_s = {key: since_s for key, since_s in self._silent_since_s.items() if key in keys}


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
