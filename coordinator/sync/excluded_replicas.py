"""Replicas that are announced and take no part in weight syncs: why, since when, and when it is tried with them again.

why it is left out                     what it costs from then on
absent: it did not answer, or a rank   nothing: no roll call waits for it again; it is back with its answer and slots
  had no slot, when it was waited for
failing: it lives, and its own call    a round of its own: immediately after a first, quick failure,
  in a round failed                    then ever more rarely
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tandem_clients.replica import Replica

# A failure that came sooner may have been an accident, and costs little to find out.
QUICK_S = 5.0
# Pauses before the next round of a replica that fails: they double, and rounds take a tenth of the time at most.
FIRST_PAUSE_S, LONGEST_PAUSE_S, COST_FACTOR = 5.0, 600.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why a replica is left out.

    Attributes:
        since_s: Unix time.
        failures: of its own calls, in a row; 0: it is absent.
        next_s: when the next round of its own is due, in seconds of time.monotonic.
    """

    reason: str
    since_s: float
    failures: int = 0
    next_s: float = 0.0

    @property
    def is_absent(self) -> bool:
        """Whether it did not answer or had no slot, rather than failed."""
        return self.failures == 0

    @property
    def is_due(self) -> bool:
        """Whether it may be tried again now."""
        return time.monotonic() >= self.next_s


class LeftOut:
    """The replicas that are left out now, by process: one that is started anew has a new `Replica`."""

    def __init__(self) -> None:
        self._why: dict[Replica, Why] = {}

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._why

    def all(self) -> dict[str, Why]:
        """Return all of them, by name."""
        return {replica.name: why for replica, why in self._why.items()}

    def is_absent(self, replica: Replica) -> bool:
        """Whether it was waited for in vain."""
        why = self._why.get(replica)
        return why is not None and why.is_absent

    def is_due(self, replica: Replica) -> bool:
        """Whether it may be tried now: it is not left out, or long enough."""
        why = self._why.get(replica)
        return why is None or why.is_due

    def note_absent(self, replica: Replica, reason: str) -> None:
        """Note one that was waited for in vain; the first reason stays."""
        if not self.is_absent(replica):
            self._why[replica] = Why(reason=reason, since_s=self._since_s(replica))

    def note_failure(self, replica: Replica, error: Exception, cost_s: float, *, may_pass: bool) -> None:
        """Note one that lives, and whose part in a round of `cost_s` failed.

        Args:
            may_pass: whether the same round may succeed when it is tried again immediately.
        """
        before = self._why.get(replica)
        failures = 1 if before is None else before.failures + 1
        pause_s = max(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), COST_FACTOR * cost_s)
        pause_s = 0.0 if failures == 1 and may_pass and cost_s < QUICK_S else min(LONGEST_PAUSE_S, pause_s)
        next_s = time.monotonic() + pause_s
        self._why[replica] = Why(reason=str(error), since_s=self._since_s(replica), failures=failures, next_s=next_s)

    def forget(self, replicas: Iterable[Replica]) -> None:
        """Forget these: they are back, or have the weights."""
        for replica in replicas:
            self._why.pop(replica, None)

    def keep(self, announced: Iterable[Replica]) -> None:
        """Forget those that are no longer announced."""
        self.forget(self._why.keys() - set(announced))

    def troubles(self) -> list[str]:
        """Return a sentence for each replica that is left out."""
        return [_sentence(replica.name, why) for replica, why in self._why.items()]

    def _since_s(self, replica: Replica) -> float:
        before = self._why.get(replica)
        return time.time() if before is None else before.since_s


def _sentence(name: str, why: Why) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(why.since_s))
    if why.is_absent:
        return f"{name} is left out of weight syncs since {since}, and not waited for: {why.reason}"
    times = "once" if why.failures == 1 else f"{why.failures} times"
    return f"{name} is left out of weight syncs since {since}: its part failed {times}, last with: {why.reason}"
