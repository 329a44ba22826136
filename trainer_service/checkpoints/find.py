"""Finds the checkpoint that a command names: one of a run, or a folder anywhere. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from tandem_files.checkpoints import (
    COMPLETE,
    FOLDER,
    TRAINER_FOLDER,
    Damage,
    DamagedCheckpoint,
    choose,
    inspect,
    read_complete,
)
from tandem_files.digests import damages
from tandem_files.run_config import RESOLVED_CONFIG
from trainer_service.checkpoints.files import META, read_digests, read_meta


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint whose files were compared with their digests.

    Attributes:
        folder: the trainer's part.
        title: what messages call it.
        iteration: of its run; None: the folder does not say it.
        run_dir: folder of its run; None: it lies in none.
        skipped: newer ones of the run, which are damaged.
    """

    folder: Path
    title: str
    iteration: int | None
    run_dir: Path | None
    skipped: list[Damage]


def find_checkpoint(run_dir: Path | None, which: str) -> FoundCheckpoint:
    """Find a checkpoint and read every file of it, to see that it is undamaged.

    Args:
        run_dir: None: `which` is a folder.
        which: as `choose` takes it; or a folder: one that `tandem import` has written, `checkpoints/step-N` of a run,
            `trainer/` in that, or a copy of one of these.
    Raises: ConfigError: there is none, or it is damaged.
    """
    if run_dir is None or (Path(which).is_dir() and which not in ("last", "best") and not which.isdecimal()):
        return _folder(Path(which), run_dir)
    sound = choose(run_dir, which)
    return FoundCheckpoint(
        folder=sound.folder / TRAINER_FOLDER,
        title=f"iteration {sound.iteration} of {run_dir}",
        iteration=sound.iteration,
        run_dir=run_dir,
        skipped=sound.skipped,
    )


def run_above(folder: Path) -> Path | None:
    """Return the folder of the run in whose checkpoints a folder lies; None: in none, or that has no configuration."""
    found = [above.parent for above in folder.absolute().parents if above.name == FOLDER]
    return next((run_dir for run_dir in found if (run_dir / RESOLVED_CONFIG).is_file()), None)


def _folder(folder: Path, run_dir: Path | None) -> FoundCheckpoint:
    trainer, mark = folder, dict[str, Any]()
    if (folder / COMPLETE).is_file():
        trainer, mark = folder / TRAINER_FOLDER, read_complete(folder)
        damage = inspect(folder, deep=True)
    elif (folder / META).is_file():
        digests, faults = read_digests(folder)
        damage = "; ".join(faults + damages(folder, digests))
    else:
        raise ConfigError(
            f"{_why_not(folder)}: give a folder that `tandem import` has written, or a run's {FOLDER}/step-N"
        )
    if damage:
        raise DamagedCheckpoint(f"checkpoint {folder}: {damage}: restore the file from a copy, or choose another one")
    read_meta(trainer)
    return FoundCheckpoint(
        folder=trainer,
        title=f"checkpoint {folder}",
        iteration=mark.get("iteration"),
        run_dir=run_dir if run_dir is not None else run_above(folder),
        skipped=[],
    )


def _why_not(folder: Path) -> str:
    """Say why a folder is no checkpoint."""
    if not folder.is_dir():
        return f"--checkpoint {folder}: no such folder"
    if (folder / TRAINER_FOLDER / META).is_file():
        return f"--checkpoint {folder} has no {COMPLETE}, so it was not finished"
    return f"--checkpoint {folder} is no checkpoint: it has neither {COMPLETE} nor {META}"
