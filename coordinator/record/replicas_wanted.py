"""How many replicas an autoscaler should give a run: `tandem_replicas_wanted`, from how busy both sides are.

Its measure is the seconds for which all engines were busy / those for which the trainer was, over some iterations.

| measure                              | wanted, of R replicas                                           |
|--------------------------------------|-----------------------------------------------------------------|
| GROW or more: the trainer waits      | as many as bring it to GOAL, 2 R at most                        |
| SHRINK or less: slots idle           | as many as bring it to GOAL, R / 2 at least; more than were too |
|                                      | few in the last MEMORY iterations                               |
| between, or the fleet is not whole   | R                                                               |

An engine is as busy as the completions that run are many, of the most that ran lately: rollout.max_running_requests may
be far more than its KV cache takes. What fewer replicas take longer for is not proportional, which MEMORY is for.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.record.sinks import FinishedIteration
from coordinator.watch import metrics

GROW, GOAL, SHRINK = 1.25, 0.9, 0.7
ROWS, LEAST_ROWS, MEMORY = 8, 3, 100


@dataclass(frozen=True, kw_only=True)
class IterationWork:
    """One iteration's. compute_s: of the trainer; running_s: of all completions; most_running: at a time."""

    compute_s: float
    running_s: float
    most_running: int


class ReplicasWanted:
    """A sink that exports the number.

    Args:
        slots: rollout.max_running_requests.
        least: fewest replicas that the run can have.
        expected: returns how many replicas there should be.
    """

    name = "tandem_replicas_wanted"

    def __init__(self, *, slots: int, least: int, expected: Callable[[], int]) -> None:
        self._slots, self._least, self._expected = slots, least, expected
        self._works: deque[IterationWork] = deque(maxlen=ROWS)
        self._size = 0  # of the fleet in these iterations
        self._too_few: dict[int, int] = {}  # sizes at which the trainer waited, with iterations until it is forgotten

    def take(self, finished: FinishedIteration) -> str | None:
        """Export what an iteration leads to."""
        if finished.record is not None:
            done, compute_s = finished.record.generation, finished.row.get("trainer_compute_s") or 0.0
            work = IterationWork(compute_s=compute_s, running_s=done.running_s, most_running=done.most_running)
            metrics.REPLICAS_WANTED.set(self.wanted(work, done.slots // self._slots))
        return None

    def close(self) -> str | None:
        """Nothing is held back."""
        return None

    def wanted(self, work: IterationWork, serving: int) -> int:
        """Return how many replicas there should be after an iteration in which so many served."""
        size = max(self._expected(), 1)
        self._too_few = {few: left - 1 for few, left in self._too_few.items() if left > 1}
        if size != self._size:
            self._works.clear()
            self._size = size
        if serving == size and work.compute_s:  # else nothing was trained
            self._works.append(work)
        if len(self._works) < LEAST_ROWS:
            return size
        most = min(max(max(one.most_running for one in self._works), 1), size * self._slots)
        measure = sum(one.running_s for one in self._works) / most / sum(one.compute_s for one in self._works)
        goal = math.ceil(size * measure / GOAL)
        if measure >= GROW:
            self._too_few[size] = MEMORY
            return max(size + 1, min(goal, 2 * size))
        if measure <= SHRINK:
            few = max((few for few in self._too_few if few < size), default=0)
            return min(size, max(goal, few + 1, size // 2, self._least))
        return size
