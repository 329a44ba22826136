"""Counts checkpoints that were not written: the run continues, with alarms, until there are too many in a row."""

from dataclasses import dataclass

from coordinator.checkpoints.writing import NotWritten
from coordinator.record.progress import Progress
from coordinator.record.state import RunState
from coordinator.watch import metrics


@dataclass(frozen=True, kw_only=True)
class MissedCheckpoints:
    """The checkpoints missed in a row.

    Attributes:
        budget: run.missed_checkpoint_budget.
    """

    state: RunState
    progress: Progress
    budget: int

    def none(self) -> None:
        """Note that a checkpoint was written, or that the run begins with one."""
        self.state.missed_checkpoints = []
        metrics.MISSED_CHECKPOINTS.set(0)

    def note(self, iteration: int, error: NotWritten) -> None:
        """Note that the checkpoint of an iteration was not written.

        Raises: NotWritten: that is one too many.
        """
        missed = self.state.missed_checkpoints
        missed.append(f"The checkpoint of iteration {iteration} was not written: {error}.")
        metrics.MISSED_CHECKPOINTS.set(len(missed))
        left = self.budget - len(missed)
        if left < 0:
            raise NotWritten(
                f"{len(missed)} checkpoints in a row were not written, and run.missed_checkpoint_budget is "
                f"{self.budget}; the last, of iteration {iteration}: {error}"
            ) from error
        more = f"{left} more may be missed" if left else "the next miss ends the run"
        self.progress.warn("missed_checkpoint", f"{missed[-1][:-1]}; the run continues, {more}")
