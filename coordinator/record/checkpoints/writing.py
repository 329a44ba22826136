"""Writes a run's checkpoints: the trainer's files, the coordinator's state, and the mark that both are complete.

checkpoints/step-00000012/trainer/           the trainer's: weights, optimizer, RNG
                          coordinator.json   RunState after iteration 12
                          complete.json      written last; has the model and digests
"""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from coordinator.clients.trainer import Trainer
from coordinator.leaving import message_of
from coordinator.record.state import BestPolicy, RunState
from servicekit.errors import DeadlineExceeded, Internal
from servicekit.logs import get_logger
from tandem_files.atomic import no_check
from tandem_files.checkpoints import (
    COORDINATOR_FILE,
    TRAINER_FOLDER,
    BestCheckpoint,
    mark_best,
    mark_complete,
    prune,
    step_folder,
)

log = get_logger(__name__)


class NotWritten(Internal):
    """A checkpoint was not written, e.g. since the disk is full; trainer and run are as they were."""


class Checkpointer:
    """Writes the checkpoints of one run.

    Args:
        model: folder of the model, for messages.
        keep: number of newest checkpoints to keep.
    """

    def __init__(self, *, run_dir: Path, model: str, trainer: Trainer, keep: int) -> None:
        self._run_dir = run_dir
        self._model = model
        self._trainer = trainer
        self._keep = keep

    async def save_trainer(self, iteration: int) -> None:
        """Let the trainer write its part; the checkpoint is unfinished until `complete`.

        Raises: NotWritten: it could not; TandemError: the trainer is lost.
        """
        folder = step_folder(self._run_dir, iteration)
        try:
            with _not_written():
                # Files that a crash left under this number must not mix with the new ones.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                folder.mkdir(parents=True)
                await self._trainer.save_checkpoint(self.trainer_folder(iteration))
        except NotWritten:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # it may fill the disk
            await self._trainer.status()  # raises if the trainer is lost, which ends the run by its name
            raise

    def trainer_folder(self, iteration: int) -> Path:
        """Return the folder of the trainer's part of a checkpoint, whether it exists or not."""
        return (step_folder(self._run_dir, iteration) / TRAINER_FOLDER).absolute()

    async def complete(
        self,
        state: RunState,
        check_lead: Callable[[], Awaitable[None]],
        before_write: Callable[[], None] = no_check,
    ) -> None:
        """Add the coordinator's state, mark the checkpoint complete, remove the oldest.

        Args:
            check_lead: called before each file is written; raises if this coordinator no longer leads the run.
            before_write: the same, called immediately before a file is replaced.
        Raises: NotWritten: a file could not be written.
        """
        folder = step_folder(self._run_dir, state.iteration)
        try:
            with _not_written():
                await check_lead()
                await asyncio.to_thread(state.save, folder / COORDINATOR_FILE, before_write)
                await check_lead()
                await asyncio.to_thread(self._mark, folder, state, before_write)
        except NotWritten:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        await asyncio.to_thread(self._prune)

    async def mark_best(self, best: BestPolicy | None, before_write: Callable[[], None] = no_check) -> None:
        """Mark the checkpoint of the best policy, which is kept, if there is one; the initial policy has none."""
        trained = None if best is None or best.iteration == 0 else BestCheckpoint(**best.model_dump())
        await asyncio.to_thread(mark_best, self._run_dir, trained, before_write)

    def _mark(self, folder: Path, state: RunState, before_write: Callable[[], None]) -> None:
        mark_complete(
            folder,
            before_write,
            iteration=state.iteration,
            policy_version=state.policy_version,
            model=self._model,
            model_fingerprint=state.model_fingerprint,
        )

    def _prune(self) -> None:
        try:
            prune(self._run_dir, self._keep)
        except OSError as error:  # the next one removes them too
            log.warning("old checkpoints not removed", error=str(error))


@contextlib.contextmanager
def _not_written() -> Iterator[None]:
    """Turn what a full or broken disk causes, here or in the trainer, into NotWritten."""
    try:
        yield
    except (OSError, Internal, DeadlineExceeded) as error:
        raise NotWritten(message_of(error)) from error
