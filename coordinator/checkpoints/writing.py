"""Writes a run's checkpoints: the trainer's files, the coordinator's state, and the mark that both are complete.

checkpoints/step-00000012/trainer/           the trainer's: weights, optimizer, RNG
                          coordinator.json   RunState after iteration 12
                          complete.json      written last; has the model, the run's id and configuration, and digests
            latest                           name of the newest complete one, written after its complete.json
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.record.state import BestPolicy, NotWritten, RunState
from servicekit.errors import (
    Aborted,
    DeadlineExceeded,
    Internal,
    NotReady,
    PeerLost,
    SlotTaken,
    Unavailable,
    WrongVersion,
    describe,
    in_part,
)
from servicekit.lifecycle.tasks import cancel
from servicekit.logs import get_logger
from tandem_clients.trainer import Trainer
from tandem_files.atomic import NotRemoved, make_way, naming, no_check
from tandem_files.checkpoints import (
    COORDINATOR_FILE,
    TRAINER_FOLDER,
    BestCheckpoint,
    mark_best,
    mark_complete,
    mark_latest,
    prune,
    remove_checkpoint,
    step_folder,
)

# What a full or broken disk causes; besides, what the loss of the trainer causes.
_FULL = (OSError, Internal, DeadlineExceeded, NotReady)
_LOST = (*_FULL, Aborted, PeerLost, Unavailable, WrongVersion)

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A checkpoint that is being finished."""

    iteration: int
    done: "asyncio.Task[None]"


class Checkpointer:
    """Writes the checkpoints of one run, one at a time: `save_trainer`, `complete`, `settle`.

    Args:
        model: folder of the model, for messages.
        mark: what complete.json says of the run (tandem_config.comparing.resuming.mark_of).
        keep: number of newest checkpoints to keep.
        background: let the trainer continue while its part is written; None: if it computes on GPUs.
        left: called with what could not be removed of old checkpoints (tandem_files.atomic.remove_each).
        check: called immediately before each change of a file; raises if this coordinator no longer leads the run.
    Attributes:
        newest: iteration of the newest checkpoint that is complete or being finished; -1: none.
        running: the one that is being finished; None: none is.
        writing: the trainer continues while its part of the last one is written.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        model: str,
        trainer: Trainer,
        keep: int,
        background: bool | None,
        mark: Mapping[str, Any],
        left: Callable[[Sequence[str]], object] = lambda _: None,
        check: Callable[[], None] = no_check,
    ) -> None:
        self._run_dir, self._check = run_dir, check
        self._mark = dict(mark)
        self._model = model
        self._trainer = trainer
        self._keep = keep
        self._background = background
        self._left = left
        self.newest = -1
        self.running: Running | None = None
        self.writing = False

    async def save_trainer(self, iteration: int) -> None:
        """Let the trainer write its part, or begin to; the one before must be settled.

        Raises: NotWritten: it could not; TandemError: the trainer is lost.
        """
        folder = step_folder(self._run_dir, iteration)
        async with self._clean(folder):
            # Files that a crash left under this number must not mix with the new ones.
            await asyncio.to_thread(make_way, folder, self._check)
            with naming(folder):
                folder.mkdir(parents=True)
            trainer_folder = self.trainer_folder(iteration)
            self.writing = await self._trainer.save_checkpoint(trainer_folder, background=self._background)

    def trainer_folder(self, iteration: int) -> Path:
        """Return the folder of the trainer's part of a checkpoint, whether it exists or not."""
        return (step_folder(self._run_dir, iteration) / TRAINER_FOLDER).absolute()

    async def complete(self, state: RunState, check_lead: Callable[[], Awaitable[None]]) -> None:
        """Add the coordinator's state, and begin to wait for the trainer's part; `settle` says how it ends.

        Args:
            check_lead: called before each file is written; raises if this coordinator no longer leads the run.
        Raises: NotWritten: the state could not be written.
        """
        folder = step_folder(self._run_dir, state.iteration)
        async with self._clean(folder):
            await check_lead()
            await asyncio.to_thread(state.save, folder / COORDINATOR_FILE, self._check)
        # As it is now: the state changes while the trainer's part is being written.
        mark = partial(
            mark_complete,
            folder,
            self._check,
            iteration=state.iteration,
            policy_version=state.policy_version,
            model=self._model,
            model_fingerprint=state.model_fingerprint,
            **self._mark,
        )
        self.newest = state.iteration
        finishing = asyncio.create_task(self._finish(folder, mark, check_lead), name="checkpoint")
        self.running = Running(iteration=state.iteration, done=finishing)

    async def _finish(self, folder: Path, mark: Callable[[], None], check_lead: Callable[[], Awaitable[None]]) -> None:
        """Wait for the trainer's part, mark the checkpoint complete, then as the latest, remove the oldest."""
        async with self._clean(folder, _LOST):  # the trainer, too: what needs it next notices
            if self.writing:
                await self._trainer.finish_checkpoint((folder / TRAINER_FOLDER).absolute())
            await check_lead()
            await asyncio.to_thread(mark)
        await asyncio.to_thread(self._point)
        self._left(await asyncio.to_thread(self._prune))

    async def settle(self) -> None:
        """Wait until the checkpoint that is being finished is complete, if there is one.

        Raises: NotWritten: it was not written; TandemError: the trainer is lost, or another coordinator leads.
        """
        if self.running is None:
            return
        try:
            # A caller that gives up does not end it.
            await asyncio.shield(self.running.done)
        except BaseException:
            if self.running.done.done():
                self.newest, self.running = -1, None
            raise
        self.running = None

    @property
    def has_ended(self) -> bool:
        """Whether `settle` has something to say immediately."""
        return self.running is not None and self.running.done.done()

    async def linger(self, timeout_s: float) -> None:
        """Give the checkpoint that is being finished some time, if there is one: a run that failed resumes from it."""
        if self.running is not None:
            await asyncio.wait([self.running.done], timeout=timeout_s)

    async def close(self) -> None:
        """End the checkpoint that is being finished; it stays unfinished then."""
        if self.running is not None:
            await cancel(self.running.done)

    @contextlib.asynccontextmanager
    async def _clean(self, folder: Path, missed: tuple[type[Exception], ...] = _FULL) -> AsyncIterator[None]:
        """Turn what a full or broken disk causes, here or in the trainer, into NotWritten, and leave nothing behind.

        Args:
            missed: the errors that cost this checkpoint only.
        Raises: TandemError: the trainer is lost.
        """
        try:
            with in_part(f"checkpoint {folder.name}"):
                yield
        except SlotTaken:  # another coordinator leads
            raise
        except missed as error:
            await asyncio.to_thread(remove_checkpoint, folder, self._check)  # it may fill the disk
            if missed is _FULL:
                await self._trainer.status()
            raise NotWritten(describe(error, advise=False)) from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            await asyncio.to_thread(remove_checkpoint, folder, self._check)
            raise NotWritten(f"checkpoint {folder.name}: it was cancelled from inside: see the log") from error

    async def mark_best(self, best: BestPolicy | None) -> None:
        """Mark the checkpoint of the best policy, which is kept, if there is one; the initial policy has none."""
        trained = None if best is None or best.iteration == 0 else BestCheckpoint(**best.model_dump())
        await asyncio.to_thread(mark_best, self._run_dir, trained, self._check)

    def _point(self) -> None:
        try:
            mark_latest(self._run_dir, self._check)
        except OSError as error:  # the checkpoint is complete without it
            log.warning("latest checkpoint not marked", error=str(error))

    def _prune(self) -> list[str]:
        """Remove the oldest checkpoints. Returns: what is left of them; the next one removes it too."""
        try:
            prune(self._run_dir, self._keep, self._check)
        except NotRemoved as error:
            return error.left
        except OSError as error:
            return [describe(error)]
        return []
