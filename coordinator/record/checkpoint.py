"""Writes and loads checkpoints: the trainer's files, the coordinator's state, and the mark that both are complete.

checkpoints/step-00000012/trainer/           the trainer's: weights, optimizer, RNG
                          coordinator.json   RunState after iteration 12
                          complete.json      written last; has the model and digests
"""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.clients.trainer import Trainer
from coordinator.record.state import BestPolicy, RunState
from servicekit.errors import ConfigError
from servicekit.logs import get_logger
from tandem_files.atomic import no_check
from tandem_files.checkpoints import (
    COMPLETE,
    COORDINATOR_FILE,
    TRAINER_FOLDER,
    BestCheckpoint,
    Sound,
    list_complete,
    mark_best,
    mark_complete,
    newest_sound,
    prune,
    read_complete,
    set_aside,
    step_folder,
)

log = get_logger(__name__)


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
        """Let the trainer write its part; the checkpoint is unfinished until `complete`."""
        folder = step_folder(self._run_dir, iteration)
        # Files that a crash left under this number must not mix with the new ones.
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        await self._trainer.save_checkpoint(self.trainer_folder(iteration))

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
        """
        folder = step_folder(self._run_dir, state.iteration)
        await check_lead()
        await asyncio.to_thread(state.save, folder / COORDINATOR_FILE, before_write)
        await check_lead()
        await asyncio.to_thread(self._mark, folder, state, before_write)

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
        prune(self._run_dir, self._keep)


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The checkpoint to resume from: its state, and the damaged ones that were skipped."""

    state: RunState
    sound: Sound


def load_newest(run_dir: Path, *, model: str, fingerprint: str) -> Newest | None:
    """Load the newest undamaged checkpoint; None if there is none.

    Args:
        model: folder of this run's model.
        fingerprint: fingerprint of this run's model.
    Raises: ConfigError: the checkpoint is of another model; DamagedCheckpoint: all are damaged.
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
    """Return when each complete checkpoint was marked (ns), to notice that another process continued the run."""
    found = {}
    for _, folder in list_complete(run_dir):
        with contextlib.suppress(FileNotFoundError):  # pruned just now
            found[folder.name] = (folder / COMPLETE).stat().st_mtime_ns
    return found


def set_damaged_aside(sound: Sound) -> Iterator[tuple[str, str]]:
    """Rename newer checkpoints that could not be used, so that later ones can be written.

    Yields: what is wrong with each, and what was done about it.
    """
    for damage, complaint in zip(sound.skipped, sound.complaints(), strict=True):
        try:
            aside = set_aside(damage)
        except OSError as error:  # it stays where it is, and the next resume skips it too
            log.warning("damaged checkpoint not moved", folder=str(damage.folder), error=str(error))
            aside = None
        yield complaint, "" if aside is None else f"; it is kept as {aside.name}"
