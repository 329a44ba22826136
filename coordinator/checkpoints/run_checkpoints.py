"""When a run's checkpoints are written, and what follows from one that was not.

The run continues without a checkpoint that could not be written, with alarms, until there are too many in a row.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.checkpoints.loading import set_damaged_aside
from coordinator.checkpoints.writing import Checkpointer
from coordinator.leader_lease import LeaderCheck
from coordinator.ledger.ledger import Ledger
from coordinator.record.progress import Progress
from coordinator.record.state import NotWritten, RunState
from coordinator.watch import metrics
from servicekit.lifecycle.tasks import first_of
from servicekit.logs import get_logger
from tandem_files.checkpoints import UndamagedCheckpoint, keep_checkpoint
from tandem_files.metrics_file import MetricsFile

log = get_logger(__name__)


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


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints:
    """The checkpoints of a run, one after the other: the trainer's part first, then the run's state.

    Attributes:
        rows: metrics.jsonl, on disk before the checkpoint that counts its rows.
        ledger: has the checkpoint before it is complete.
        every: run.checkpoint_every, in iterations.
    """

    run_dir: Path
    checkpointer: Checkpointer
    missed: MissedCheckpoints
    state: RunState
    progress: Progress
    rows: MetricsFile
    ledger: Ledger
    lead: LeaderCheck
    every: int
    _extra: set[int] = field(default_factory=set, init=False)  # iterations with one that only the ledger wanted

    def __post_init__(self) -> None:
        self.checkpointer.newest = self.state.iteration if self.state.iteration else -1

    def set_damaged_aside(self, damaged: UndamagedCheckpoint | None) -> None:
        """Warn of newer checkpoints that could not be used, and rename them, so that later ones can be written."""
        for complaint, remark in [] if damaged is None else set_damaged_aside(damaged, self.lead.check):
            self.state.damaged_checkpoints.append(complaint)
            self.progress.warn("damaged_checkpoint", complaint + remark)

    def has(self, number: int, *, last: bool) -> bool:
        """Whether iteration `number` ends with a checkpoint, or has ended with one."""
        due = number % self.every == 0 or self.ledger.wants_checkpoint
        return due or last or number == self.checkpointer.newest

    def trainer_folder(self) -> Path | None:
        """Return the trainer's folder of the checkpoint that the run resumes from; None: there is none."""
        return self.checkpointer.trainer_folder(self.state.iteration) if self.state.iteration else None

    async def save_trainer(self, number: int) -> bool:
        """Begin the checkpoint of an iteration. Returns: whether that worked, or the checkpoint is missed."""
        await self.settle()
        await self.lead.confirm()
        if self.ledger.wants_checkpoint and number % self.every:
            self._extra.add(number)
        self.ledger.checkpoint_begins()
        try:
            await self.checkpointer.save_trainer(number)
        except NotWritten as error:
            self._note_missed(number, error)
            return False
        return True

    def _note_missed(self, number: int, error: NotWritten) -> None:
        """Note one that was not written. Raises: NotWritten: that is one too many of those that are due."""
        if number not in self._extra:
            self.missed.note(number, error)
            return
        what = f"a checkpoint of iteration {number}, in place of steps that are not kept, was not written"
        self.progress.warn("missed_checkpoint", f"{what}: {error}")

    async def complete(self) -> None:
        """Complete the checkpoint of the last iteration, when the trainer's part is written, or miss it."""
        self.rows.sync()
        try:
            await self.ledger.checkpoint(self.state)
            await self.checkpointer.complete(self.state, self.lead.confirm)
        except NotWritten as error:
            self._note_missed(self.state.iteration, error)
        if not self.checkpointer.writing:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the checkpoint that is being finished, if there is one, and note how it ended."""
        running = self.checkpointer.running
        if running is None:
            return
        try:
            await self.checkpointer.settle()
        except NotWritten as error:
            self._note_missed(running.iteration, error)
        else:
            self.missed.none()
            # One that was being written when it became the best could not be marked then.
            await self.mark_best()

    async def save_last(self) -> None:
        """Write a checkpoint of the last iteration, if there is one and it has none yet. Raises: NotWritten."""
        await self.settle()
        if self.state.iteration in (0, self.checkpointer.newest):
            return
        await self.lead.confirm()
        await self.checkpointer.save_trainer(self.state.iteration)
        self.rows.sync()
        await self.ledger.checkpoint(self.state)
        await self.checkpointer.complete(self.state, self.lead.confirm)
        await self.checkpointer.settle()
        self.missed.none()
        log.info("checkpoint saved at the end", iteration=self.state.iteration)

    async def save_for_trainer(
        self, settled: asyncio.Event, may_train: asyncio.Event, most_s: float, gone: asyncio.Event
    ) -> None:
        """Save a checkpoint for a trainer that ends, as soon as its policy is the run's.

        Args:
            settled: set while it is.
            may_train: cleared until it is gone: another step would have to be saved, too.
            most_s: seconds after which one that stays may train.
            gone: set once it is.
        Raises: NotWritten; TandemError: of the trainer.
        """
        may_train.clear()
        try:
            await settled.wait()
            await self.save_last()
            await first_of({"gone": gone}, timeout_s=most_s)
        finally:
            may_train.set()

    async def make_up(self) -> None:
        """Write, or miss, the checkpoint that was due and that the process before did not complete."""
        if self.state.iteration // self.every > max(0, self.checkpointer.newest) // self.every:
            try:
                await self.save_last()
            except NotWritten as error:
                self.missed.note(self.state.iteration, error)

    async def mark_best(self) -> None:
        """Mark the checkpoint of the best policy, which is kept."""
        await self.checkpointer.mark_best(self.state.best)

    def keep(self, iteration: int) -> None:
        """Keep the checkpoint of an iteration for good."""
        keep_checkpoint(self.run_dir, iteration, self.lead.check)
