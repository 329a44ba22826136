"""A trainer that dies goes on from the run's newest checkpoint, with the replicas as they are.

The coordinator starts anew with it, since what it knows is newer than the checkpoint; it takes the replicas over.
"""

from collections.abc import Sequence
from pathlib import Path

from launcher.plan_processes import COORDINATOR, is_trainer
from launcher.supervisor import ProcessExit, ProcessSpec
from servicekit.checkpoints import list_complete


class Restarts:
    """Which deaths the run outlives.

    Args:
        budget: run.trainer_restarts.
    """

    def __init__(self, run_dir: Path, budget: int) -> None:
        self._run_dir, self._budget = run_dir, budget
        self._used = 0

    def outlives(self, culprit: ProcessExit) -> str:
        """Whether the run goes on after the end of this process; counts it.

        Returns: what to tell the user; empty: it does not.
        """
        complete = list_complete(self._run_dir)
        if not is_trainer(culprit.name) or not complete or self._used == self._budget:
            return ""
        self._used += 1
        return (
            f"{culprit.describe()}; the trainer goes on from the checkpoint of iteration {complete[-1][0]} "
            f"(restart {self._used} of {self._budget}, run.trainer_restarts)"
        )


def to_restart(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Of a run's processes, those that start anew: every trainer rank, and the coordinator."""
    return [spec for spec in specs if spec.name == COORDINATOR or is_trainer(spec.name)]
