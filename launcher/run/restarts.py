"""Which deaths a run outlives, and who starts again after one.

who has died        starts again                         and goes on from
a replica           it alone                             nothing: the coordinator seeds it, as any that comes late
a trainer rank      all of them, and the coordinator     the newest checkpoint, else the initial model
the coordinator     it alone                             the same; trainer and replicas stay, it takes them over

Nobody does before this launch has done an iteration: what fails while a run starts would fail again. So would what a
configuration makes fail (exit code 2), at any time. A coordinator that ends by itself has said that the run failed, and
is believed; if it says that the trainer does not answer (exit code 3), the trainer is what has died. A replica that
dies too often, or that cannot be helped, is left out while rollout.min_replicas others are there. Anything else ends
the run: Redis, say, which holds what the others agree on.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.run.processes import is_rollout, is_trainer
from launcher.run.supervisor import ProcessExit, ProcessSpec
from servicekit.life.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_LOST_TRAINER
from servicekit.redis.records import COORDINATOR
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import newest_iteration
from tandem_files.run_folder import has_begun

HOUR_S = 3600.0
# The second restart within an hour waits for so long, each further one for twice as long.
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What is done after a death that the run outlives.

    Attributes:
        text: for the user.
        names: processes that start again; none: the run goes on without the one that died.
        delay_s: seconds until they do.
    """

    text: str
    names: frozenset[str]
    delay_s: float = 0.0

    def specs(self, planned: Sequence[ProcessSpec]) -> list[ProcessSpec]:
        """Of a run's processes, those that start again."""
        return [replace(spec, delay_s=self.delay_s) for spec in planned if spec.name in self.names]


class Restarts:
    """Told of every death; counts them. `names` are the run's processes."""

    def __init__(
        self, run_dir: Path, config: RunConfig, names: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir, self._config, self._names, self._clock = run_dir, config, names, clock
        self._spent_s: defaultdict[str, deque[float]] = defaultdict(deque)
        self._has_begun = False
        self.left_out: set[str] = set()

    def after(self, death: ProcessExit) -> Restart | None:
        """What is done now; None: the run ends."""
        self._has_begun = self._has_begun or has_begun(self._run_dir)
        if not self._has_begun:
            return None
        if is_rollout(death.name):
            return self._after_replica(death)
        if death.code == EXIT_BAD_CONFIG:
            return None
        if is_trainer(death.name) or (death.name == COORDINATOR and death.code == EXIT_LOST_TRAINER):
            return self._after_trainer(death)
        if death.name == COORDINATOR and death.code != EXIT_FAILED:
            return self._after_coordinator(death)
        return None

    def _after_trainer(self, death: ProcessExit) -> Restart | None:
        count = self._spend("trainer", self._config.run.trainer_restarts)
        if count == 0:
            return None
        text = f"{death.describe()}; the trainer goes on from {self._newest()} ({self._of('trainer', count)})"
        return self._restart(text, {name for name in self._names if is_trainer(name)} | {COORDINATOR}, count)

    def _after_coordinator(self, death: ProcessExit) -> Restart | None:
        count = self._spend(COORDINATOR, self._config.run.coordinator_restarts)
        if count == 0:
            return None
        text = f"{death.describe()}; it takes the others over, from {self._newest()} ({self._of(COORDINATOR, count)})"
        return self._restart(text, {COORDINATOR}, count)

    def _after_replica(self, death: ProcessExit) -> Restart | None:
        hopeless = death.code == EXIT_BAD_CONFIG
        count = 0 if hopeless else self._spend(death.name, self._config.run.replica_restarts)
        if count:
            text = f"{death.describe()}; it starts again and is seeded ({self._of('replica', count)})"
            return Restart(text=text, names=frozenset({death.name}), delay_s=_back_off_s(count))
        self.left_out.add(death.name)
        there = [name for name in self._names if is_rollout(name) and name not in self.left_out]
        if len(there) < self._config.rollout.min_replicas:
            return None
        why = "a restart cannot help" if hopeless else "run.replica_restarts are used up"
        text = f"{death.describe()}; {why}: going on with {', '.join(there)}"
        return Restart(text=text, names=frozenset())

    def _restart(self, text: str, names: set[str], count: int) -> Restart:
        """A coordinator begins with all replicas: those that were left out get another chance."""
        names |= self.left_out
        self.left_out = set()
        return Restart(text=text, names=frozenset(names), delay_s=_back_off_s(count))

    def _spend(self, who: str, budget: int) -> int:
        """Take one restart. Returns: which one it is within the last hour; 0: there is none left."""
        spent_s, now_s = self._spent_s[who], self._clock()
        while spent_s and now_s - spent_s[0] >= HOUR_S:
            spent_s.popleft()
        if len(spent_s) >= budget:
            return 0
        spent_s.append(now_s)
        return len(spent_s)

    def _of(self, kind: str, count: int) -> str:
        return f"restart {count} of {getattr(self._config.run, f'{kind}_restarts')} an hour, run.{kind}_restarts"

    def _newest(self) -> str:
        newest = newest_iteration(self._run_dir)
        return "the beginning: no checkpoint is there" if newest is None else f"the checkpoint of iteration {newest}"


def _back_off_s(count: int) -> float:
    """Seconds before the count-th restart within an hour: none, 1, 2, 4, ... 60."""
    return 0.0 if count == 1 else min(_FIRST_BACK_OFF_S * 2.0 ** (count - 2), _LONGEST_BACK_OFF_S)
