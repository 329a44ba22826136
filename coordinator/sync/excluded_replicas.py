"""Replicas that are announced and take no part in weight syncs: why, since when, and when it is tried with them again.

why it is left out                     what it costs from then on
absent: it did not answer, or a rank   nothing: no roll call waits for it again; it is back with its answer and slots
  had no slot, when it was waited for
failing: it lives, and its own call    a round of its own: immediately after a first, quick failure,
  in a round failed                    then ever more rarely
flapping: processes of its name have   nothing until a pause is over, which doubles with each more of them: neither its
  ended, one after the other, before   answer nor its slots are waited for; then a round of its own. Forgotten once one
  they had served for long             has served for WELL_S
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from coordinator.watch.life import Life
from servicekit.logs import get_logger
from tandem_clients.replica import Replica

# A failure that came sooner may have been an accident, and costs little to find out.
QUICK_S = 5.0
# Pauses before the next round of a replica that fails: they double, and rounds take a tenth of the time at most.
FIRST_PAUSE_S, LONGEST_PAUSE_S, COST_FACTOR = 5.0, 600.0, 10.0
# A process that has served for so long was no failure, whatever became of it; so many that did not are no accident.
WELL_S, ACCIDENTS = 60.0, 1
# After this long without a process of its name a replica may be another one.
FORGOTTEN_S = 3600.0

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why a replica is left out.

    Attributes:
        since_s: Unix time.
        failures: of its own calls, or of its processes, in a row; 0: it is absent.
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


@dataclass(kw_only=True)
class _Life:
    """A replica's present process.

    Attributes:
        short: processes before it that ended soon, in a row.
        seen_s, serving_s: when it was last announced, and since when it serves, of time.monotonic.
    """

    replica: Replica
    short: int = 0
    seen_s: float
    serving_s: float | None = None
    has_served_well: bool = False


class LeftOut:
    """The replicas that are left out now, by process: one that is started anew has a new `Replica`.

    Args:
        warn: called with a sentence when one begins to flap.
        life: notes it, too.
    """

    def __init__(self, warn: Callable[[str], None] = log.warning, life: Life | None = None) -> None:
        self._why: dict[Replica, Why] = {}
        self._lives: dict[str, _Life] = {}
        self._warn, self._life = warn, life or Life()

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._why

    def reasons(self) -> dict[str, str]:
        """Return why each of them is, by name."""
        return {replica.name: why.reason for replica, why in self._why.items()}

    def is_absent(self, replica: Replica) -> bool:
        """Whether it was waited for in vain."""
        why = self._why.get(replica)
        return why is not None and why.is_absent

    def is_due(self, replica: Replica) -> bool:
        """Whether it may be tried now: it is not left out, or long enough."""
        why = self._why.get(replica)
        return why is None or why.is_due

    def is_awaited(self, replica: Replica) -> bool:
        """Whether a roll call waits for its slots."""
        return not self.is_absent(replica) and self.is_due(replica)

    def look(self, announced: Sequence[Replica], serving: Collection[Replica]) -> list[Replica]:
        """Note who is announced now, and who of them serves. Returns: those that have begun to flap."""
        self.keep(announced)
        now_s, flapping = time.monotonic(), []
        for replica in announced:
            before = self._lives.get(replica.name)
            if before is None or before.replica is not replica:
                self._lives[replica.name] = life = _Life(replica=replica, short=_short(before), seen_s=now_s)
                if life.short > ACCIDENTS:
                    self._quarantine(replica, life.short)
                    flapping.append(replica)
            life = self._lives[replica.name]
            life.seen_s, before_s = now_s, life.serving_s
            life.serving_s = (now_s if before_s is None else before_s) if replica in serving else None
            if life.serving_s is not None and now_s - life.serving_s >= WELL_S:
                life.short, life.has_served_well = 0, True
        self._lives = {name: life for name, life in self._lives.items() if now_s - life.seen_s < FORGOTTEN_S}
        return flapping

    def _quarantine(self, replica: Replica, short: int) -> None:
        reason = f"its last {short} processes ended before they had served for {WELL_S:g} s"
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(short - ACCIDENTS, 10))
        next_s = time.monotonic() + pause_s
        self._why[replica] = why = Why(reason=reason, since_s=time.time(), failures=short, next_s=next_s)
        self._warn(_sentence(replica.name, why))
        self._life.note("replica quarantined", f"{reason}; tried again in {pause_s:g} s", who=replica.name)

    def note_absent(self, replica: Replica, reason: str) -> None:
        """Note one that was waited for in vain; the first reason stays, as that of one that must not be tried yet."""
        if self.is_awaited(replica):
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
        times = "once" if failures == 1 else f"{failures} times"
        reason = f"its part failed {times}, last with: {error}"
        self._why[replica] = Why(reason=reason, since_s=self._since_s(replica), failures=failures, next_s=next_s)

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
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + why.next_s - time.monotonic()))
    until = "it is tried again" if why.is_due else f"until {until}"
    return f"{name} is left out of weight syncs since {since}, {until}: {why.reason}"


def _short(before: _Life | None) -> int:
    """Count the processes in a row that have ended soon, by the last one; if that was asked to end, it begins anew."""
    ended_well = before is None or before.has_served_well or before.replica.left
    return 0 if before is None or ended_well else before.short + 1
