"""Decides which processes start again after one has died, or that the run ends.

died                what starts again                    where it resumes from
a replica           the replica                          nothing: the coordinator seeds it, like any late replica
a trainer rank      all ranks and the coordinator        the newest checkpoint, else the initial model
the coordinator     the coordinator                      the same; trainer and replicas keep running, it takes them over

Nothing starts again before this launch has done an iteration, because what fails during start-up would fail again. Nor
does anything after a configuration error (exit code 2). A coordinator that exits by itself (exit code 1) has reported
that the run failed, which ends it; with exit code 3 it reports that the trainer is lost, which counts as the trainer's
death. A replica that dies too often, or of a configuration error, is left out as long as rollout.min_replicas others
remain. Any other death ends the run, e.g. that of Redis, which holds the state that the services share.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.run.processes import is_rollout, is_trainer
from launcher.run.supervisor import ProcessExit, ProcessSpec
from servicekit.lifecycle.budget import HourlyBudget
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_LOST_TRAINER
from servicekit.redis.records import COORDINATOR
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import newest_iteration
from tandem_files.run_folder import has_begun

# Delay of the second restart within an hour; it doubles with every further one, up to the longest.
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The reaction to a death that does not end the run.

    Attributes:
        text: for the user.
        names: processes that start again; empty: the run continues without the one that died.
        delay_s: seconds until they start.
    """

    text: str
    names: frozenset[str]
    delay_s: float = 0.0

    def specs(self, planned: Sequence[ProcessSpec]) -> list[ProcessSpec]:
        """Select, from the planned processes of the run, those that start again."""
        return [replace(spec, delay_s=self.delay_s) for spec in planned if spec.name in self.names]


class Restarts:
    """Decides after every death, and counts restarts against their budgets.

    Args:
        names: the run's processes.
        clock: monotonic seconds.
    """

    def __init__(
        self, run_dir: Path, config: RunConfig, names: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir, self._config, self._names, self._clock = run_dir, config, names, clock
        self._budgets: dict[str, HourlyBudget] = {}
        self._has_begun = False
        self.left_out: set[str] = set()

    def after(self, death: ProcessExit) -> Restart | None:
        """Decide what starts again after `death`; None: the run ends."""
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
        text = f"{death.describe()}; the trainer resumes from {self._newest()} ({self._of('trainer', count)})"
        return self._restart(text, {name for name in self._names if is_trainer(name)} | {COORDINATOR}, count)

    def _after_coordinator(self, death: ProcessExit) -> Restart | None:
        count = self._spend(COORDINATOR, self._config.run.coordinator_restarts)
        if count == 0:
            return None
        what = f"it takes over the services and continues where it was, or from {self._newest()}"
        text = f"{death.describe()}; {what} ({self._of(COORDINATOR, count)})"
        return self._restart(text, {COORDINATOR}, count)

    def _after_replica(self, death: ProcessExit) -> Restart | None:
        bad_config = death.code == EXIT_BAD_CONFIG
        count = 0 if bad_config else self._spend(death.name, self._config.run.replica_restarts)
        if count:
            text = f"{death.describe()}; it starts again and is seeded ({self._of('replica', count)})"
            return Restart(text=text, names=frozenset({death.name}), delay_s=_back_off_s(count))
        self.left_out.add(death.name)
        remaining = [name for name in self._names if is_rollout(name) and name not in self.left_out]
        if len(remaining) < self._config.rollout.min_replicas:
            return None
        why = "a restart cannot help" if bad_config else "run.replica_restarts are used up"
        text = f"{death.describe()}; {why}: continuing with {', '.join(remaining)}"
        return Restart(text=text, names=frozenset())

    def _restart(self, text: str, names: set[str], count: int) -> Restart:
        """Restart the processes `names` and the replicas that were left out: a new coordinator begins with all."""
        names |= self.left_out
        self.left_out = set()
        return Restart(text=text, names=frozenset(names), delay_s=_back_off_s(count))

    def _spend(self, name: str, budget: int) -> int:
        """Take a restart from the budget of `name`. Returns: its number within the last hour; 0: none is left."""
        return self._budgets.setdefault(name, HourlyBudget(budget)).spend(self._clock())

    def _of(self, kind: str, count: int) -> str:
        return f"restart {count} of {getattr(self._config.run, f'{kind}_restarts')} an hour, run.{kind}_restarts"

    def _newest(self) -> str:
        newest = newest_iteration(self._run_dir)
        return (
            "the initial model, for lack of a checkpoint" if newest is None else f"the checkpoint of iteration {newest}"
        )


def _back_off_s(count: int) -> float:
    """Return the delay of the count-th restart within an hour, in seconds: 0, 1, 2, 4, ... 60."""
    return 0.0 if count == 1 else min(_FIRST_BACK_OFF_S * 2.0 ** (count - 2), _LONGEST_BACK_OFF_S)
