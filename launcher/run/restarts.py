"""Decides which processes start again after one has died, or that the run ends.

died                what starts again                    where it resumes from
a replica           the replica                          nothing: the coordinator seeds it, like any late replica
a trainer rank      all ranks                            the newest checkpoint, else the initial model; the coordinator
                                                         waits, and lets it do the steps since then again
the coordinator     the coordinator                      trainer and replicas keep running, it takes them over

Nothing starts again before this launch has done an iteration, because what fails during start-up would fail again. Nor
does anything after a configuration error (exit code 2). A coordinator that exits by itself (exit code 1) has reported
that the run failed, which ends it; with exit code 3 it reports that the trainer is lost and cannot continue where it
was, so both start again. A replica that dies too often, or of a configuration error, is left out as long as
rollout.min_replicas others remain. Any other death ends the run, e.g. that of Redis, which holds the state that the
services share.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.run.processes import is_rollout, is_trainer
from launcher.run.supervisor import ProcessExit, ProcessSpec
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_LOST_TRAINER
from servicekit.redis.records import COORDINATOR
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import newest_iteration
from tandem_files.run_folder import has_begun, read_state

# Delay of the second restart in a row; it doubles with every further one, up to the longest.
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 60.0
# A replica that has lived so long begins to be counted anew: what other replicas have done is no progress of its own.
LIVED_WELL_S = 600.0


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
    """Decides after every death, and counts restarts in a row against their budgets.

    A row ends with progress: for trainer and coordinator a finished iteration, for a replica ten minutes.

    Args:
        names: the run's processes; changed where it is scaled (scaling.py).
        clock: monotonic seconds.
    """

    def __init__(
        self, run_dir: Path, config: RunConfig, names: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir, self._config, self.names, self._clock = run_dir, config, names, clock
        # By name, the restarts in a row, and when the last one was: in iterations, of replicas in seconds.
        self._rows: dict[str, tuple[int, float]] = {}
        self._furthest = 0
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
        if is_trainer(death.name):
            return self._after_trainer(death, set())
        if death.name == COORDINATOR and death.code == EXIT_LOST_TRAINER:
            return self._after_trainer(death, {COORDINATOR} | self._rejoining())
        if death.name == COORDINATOR and death.code != EXIT_FAILED:
            return self._after_coordinator(death)
        return None

    def _after_trainer(self, death: ProcessExit, others: set[str]) -> Restart | None:
        count = self._spend("trainer", self._config.run.trainer_restarts)
        if count == 0:
            return None
        text = f"{death.describe()}; the trainer resumes from {self._newest()} ({self._of('trainer', count)})"
        names = others.union(name for name in self.names if is_trainer(name))
        return Restart(text=text, names=frozenset(names), delay_s=_back_off_s(count))

    def _after_coordinator(self, death: ProcessExit) -> Restart | None:
        count = self._spend(COORDINATOR, self._config.run.coordinator_restarts)
        if count == 0:
            return None
        what = f"it takes over the services and continues where it was, or from {self._newest()}"
        text = f"{death.describe()}; {what} ({self._of(COORDINATOR, count)})"
        return Restart(text=text, names=frozenset({COORDINATOR} | self._rejoining()), delay_s=_back_off_s(count))

    def _after_replica(self, death: ProcessExit) -> Restart | None:
        bad_config = death.code == EXIT_BAD_CONFIG
        count = 0 if bad_config else self._spend(death.name, self._config.run.replica_restarts)
        if count:
            text = f"{death.describe()}; it starts again and is seeded ({self._of('replica', count)})"
            return Restart(text=text, names=frozenset({death.name}), delay_s=_back_off_s(count))
        self.left_out.add(death.name)
        remaining = [name for name in self.names if is_rollout(name) and name not in self.left_out]
        if len(remaining) < self._config.rollout.min_replicas:
            return None
        why = "a restart cannot help" if bad_config else "run.replica_restarts are used up"
        text = f"{death.describe()}; {why}: continuing with {', '.join(remaining)}"
        return Restart(text=text, names=frozenset())

    def _rejoining(self) -> set[str]:
        """Return the replicas that were left out, which are so no longer: a new coordinator begins with all."""
        rejoining, self.left_out = self.left_out, set()
        return rejoining

    def _spend(self, name: str, budget: int) -> int:
        """Take a restart from the budget of `name`. Returns: its number in a row; 0: none is left."""
        self._furthest = max(self._furthest, int(read_state(self._run_dir).get("iteration") or 0))
        now = self._clock() if is_rollout(name) else float(self._furthest)
        count, before = self._rows.get(name, (0, now))
        if now - before >= (LIVED_WELL_S if is_rollout(name) else 1):
            count = 0
        self._rows[name] = (count + 1, now)
        return count + 1 if count < budget else 0

    def _of(self, kind: str, count: int) -> str:
        return f"restart {count} of {getattr(self._config.run, f'{kind}_restarts')} in a row, run.{kind}_restarts"

    def _newest(self) -> str:
        newest = newest_iteration(self._run_dir)
        return (
            "the initial model, for lack of a checkpoint" if newest is None else f"the checkpoint of iteration {newest}"
        )


def _back_off_s(count: int) -> float:
    """Return the delay of the count-th restart in a row, in seconds: 0, 1, 2, 4, ... 60."""
    return 0.0 if count == 1 else min(_FIRST_BACK_OFF_S * 2.0 ** (count - 2), _LONGEST_BACK_OFF_S)
