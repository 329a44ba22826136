"""A budget of so many uses within any hour: restarts, evictions. Times are arguments."""

from collections import deque

HOUR_S = 3600.0


class HourlyBudget:
    """A budget of `per_hour` uses within any hour."""

    def __init__(self, per_hour: int) -> None:
        self.per_hour = per_hour
        self._spent_s: deque[float] = deque()

    def spend(self, now_s: float) -> int:
        """Take one use. Returns: its number within the last hour; 0: none is left."""
        while self._spent_s and now_s - self._spent_s[0] >= HOUR_S:
            self._spent_s.popleft()
        if len(self._spent_s) >= self.per_hour:
            return 0
        self._spent_s.append(now_s)
        return len(self._spent_s)

    def give_back(self) -> None:
        """Return the last use, which was not needed."""
        self._spent_s.pop()
