"""Checkpoints: the trainer's files, the coordinator's state, and a mark that says that both are there.

checkpoints/step-00000012/trainer/           the trainer's: weights, optimizer, RNG
                          coordinator.json   RunState after iteration 12
                          complete.json      written last; names the model, holds digests
"""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.clients.trainer import Trainer
from coordinator.record.state import RunState
from servicekit.errors import ConfigError
from tandem_files.atomic import nothing_more
from tandem_files.checkpoints import (
    COMPLETE,
    COORDINATOR_FILE,
    TRAINER_FOLDER,
    Sound,
    list_complete,
    mark_complete,
    newest_sound,
    prune,
    read_complete,
    step_folder,
)


class Checkpointer:
    """Writes the checkpoints of one run.

    Args:
        model: name of the model for messages (its folder).
        keep: newest checkpoints kept.
    """

    def __init__(self, *, run_dir: Path, model: str, trainer: Trainer, keep: int) -> None:
        self._run_dir = run_dir
        self._model = model
        self._trainer = trainer
        self._keep = keep

    async def save_trainer(self, iteration: int) -> None:
        """Let the trainer write its part; the checkpoint does not count before `complete`."""
        folder = step_folder(self._run_dir, iteration)
        # What a crash left half-written under this number is worth nothing and must not mix with the new files.
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        await self._trainer.save_checkpoint(self.trainer_folder(iteration))

    def trainer_folder(self, iteration: int) -> Path:
        """Where the trainer's part of a checkpoint is, or will be."""
        return (step_folder(self._run_dir, iteration) / TRAINER_FOLDER).absolute()

    async def complete(
        self,
        state: RunState,
        check_lead: Callable[[], Awaitable[None]],
        last_look: Callable[[], None] = nothing_more,
    ) -> None:
        """Add the coordinator's state, mark the checkpoint complete, remove the oldest.

        check_lead, last_look: called before each file is written, the latter in the moment before; they raise what says
            that the checkpoint is not ours to write.
        """
        folder = step_folder(self._run_dir, state.iteration)
        await check_lead()
        await asyncio.to_thread(state.save, folder / COORDINATOR_FILE, last_look)
        await check_lead()
        await asyncio.to_thread(self._mark, folder, state, last_look)

    def _mark(self, folder: Path, state: RunState, last_look: Callable[[], None]) -> None:
        mark_complete(
            folder,
            last_look,
            iteration=state.iteration,
            policy_version=state.policy_version,
            model=self._model,
            model_fingerprint=state.model_fingerprint,
        )
        prune(self._run_dir, self._keep)


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The checkpoint to go on from: its state, and what was stepped over to find it."""

    state: RunState
    sound: Sound


def load_newest(run_dir: Path, *, model: str, fingerprint: str) -> Newest | None:
    """The newest checkpoint that is as it was written; None if there is none.

    Args:
        model, fingerprint: the model of this run.
    Raises: ConfigError: the checkpoint is of another model (both are named); DamagedCheckpoint: all are damaged.
    """
    sound = newest_sound(run_dir)
    if sound is None:
        return None
    mark = read_complete(sound.folder)
    if mark.get("model_fingerprint") != fingerprint:
        raise ConfigError(
            f"checkpoint {sound.folder} is of another model: it was made from {mark.get('model')} "
            f"(fingerprint {str(mark.get('model_fingerprint'))[:12]}), this run's model.path is {model} "
            f"(fingerprint {fingerprint[:12]}): resume with the first, or start a new run"
        )
    return Newest(state=RunState.load(sound.folder / COORDINATOR_FILE), sound=sound)


def marks(run_dir: Path) -> dict[str, int]:
    """When each complete checkpoint was marked (ns): equal as long as no process of the run has gone on."""
    found = {}
    for _, folder in list_complete(run_dir):
        with contextlib.suppress(FileNotFoundError):  # pruned just now
            found[folder.name] = (folder / COMPLETE).stat().st_mtime_ns
    return found
