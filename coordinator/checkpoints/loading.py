"""Finds the checkpoint that a run resumes from, and puts damaged newer ones aside."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.record.state import RunState
from servicekit.errors import ConfigError
from servicekit.logs import get_logger
from tandem_config.comparing.resuming import RunComparison, compare
from tandem_config.schema import RunConfig
from tandem_files.atomic import no_check
from tandem_files.checkpoints import (
    COORDINATOR_FILE,
    UndamagedCheckpoint,
    list_complete,
    mark_latest,
    newest_sound,
    read_complete,
    set_aside,
)
from tandem_files.run_folder import RunIdentity

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The checkpoint to resume from: its state, the damaged ones that were skipped, how the run compares with it."""

    state: RunState
    sound: UndamagedCheckpoint
    comparison: RunComparison


def load_newest(
    run_dir: Path, config: RunConfig, fingerprint: str, identity: RunIdentity | None, *, deep: bool = True
) -> NewestCheckpoint | None:
    """Load the newest undamaged checkpoint; None if there is none.

    Args:
        fingerprint: of this run's model.
        identity: of this run, whose folder it is; None: run ids are not compared.
        deep: see tandem_files.checkpoints.inspect.
    Raises: ConfigError: the checkpoint is of another model; DamagedCheckpoint: all are damaged.
    """
    sound = newest_sound(run_dir, deep=deep)
    if sound is None:
        _warn_of_folder_above(run_dir)
        return None
    mark = read_complete(sound.folder)
    if mark.get("model_fingerprint") != fingerprint:
        raise ConfigError(
            f"checkpoint {sound.folder} is of another model: it was made from {mark.get('model')} "
            f"(fingerprint {str(mark.get('model_fingerprint'))[:12]}), this run's model.path is {config.model.path} "
            f"(fingerprint {fingerprint[:12]}): resume with the first, or start a new run"
        )
    comparison = compare(mark, config, identity)
    return NewestCheckpoint(state=RunState.load(sound.folder / COORDINATOR_FILE), sound=sound, comparison=comparison)


def _warn_of_folder_above(run_dir: Path) -> None:
    """Warn of checkpoints from before a run had a folder of its own on the volume."""
    found = list_complete(run_dir.parent)
    if found:
        log.warning(
            "the folder above holds checkpoints, which this run does not read: if they are its own, stop it and move "
            "them into its folder",
            folder=str(run_dir),
            newest=str(found[-1][1]),
        )


def set_damaged_aside(
    sound: UndamagedCheckpoint, before_write: Callable[[], None] = no_check
) -> Iterator[tuple[str, str]]:
    """Rename newer checkpoints that could not be used, so that later ones can be written.

    Args:
        before_write: as in write_bytes_atomic.

    Yields: what is wrong with each, and what was done about it.
    """
    for damage, complaint in zip(sound.skipped, sound.complaints(), strict=True):
        try:
            aside = set_aside(damage, before_write)
        except OSError as error:  # it stays where it is, and the next resume skips it too
            log.warning("damaged checkpoint not moved", folder=str(damage.folder), error=str(error))
            aside = None
        yield complaint, "" if aside is None else f"; it is kept as {aside.name}"
    if sound.skipped:
        try:
            mark_latest(sound.folder.parent.parent, before_write)
        except OSError as error:  # the next checkpoint marks itself
            log.warning("latest checkpoint not marked", error=str(error))
