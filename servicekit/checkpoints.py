"""Where checkpoints are and which of them are complete.

<run_dir>/checkpoints/step-00000012/trainer/...        written by the trainer
                                    coordinator.json   written by the coordinator
                                    complete.json      written last: without it the folder does not count
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from servicekit.files import sync_folder, write_json_atomic

COMPLETE = "complete.json"
FOLDER = "checkpoints"
_STEP = re.compile(r"step-(\d{8,})")


def step_folder(run_dir: Path, iteration: int) -> Path:
    """Folder of the checkpoint after `iteration`; not created.

    >>> str(step_folder(Path("runs/a"), 12))
    'runs/a/checkpoints/step-00000012'
    """
    if iteration < 0:
        raise ValueError(f"iteration must not be negative, got {iteration}")
    return run_dir / FOLDER / f"step-{iteration:08d}"


def mark_complete(folder: Path, **fields: Any) -> None:
    """Declares a checkpoint complete and records `fields` (JSON values) about it. Call when all files are on disk."""
    if not folder.is_dir():
        raise ValueError(f"checkpoint folder {folder} does not exist; write the checkpoint before marking it")
    write_json_atomic(folder / COMPLETE, fields)
    sync_folder(folder.parent)


def read_complete(folder: Path) -> dict[str, Any]:
    """The fields given to mark_complete.

    Raises: ConfigError: the checkpoint is not complete, or its mark is damaged.
    """
    path = folder / COMPLETE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder} is not a complete checkpoint ({error}); choose another one") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); remove {folder} to go on from an older one") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds {type(fields).__name__}, expected an object; remove {folder}")
    return fields


def list_complete(run_dir: Path) -> list[tuple[int, Path]]:
    """(iteration, folder) of every complete checkpoint, oldest first; empty if there are none."""
    return [(iteration, folder) for iteration, folder in _list_all(run_dir) if (folder / COMPLETE).is_file()]


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Removes all but the `keep` newest complete checkpoints, and what a crash left unfinished before the newest.

    Never touches an unfinished folder newer than every complete one: it is being written.
    Returns: the folders that were removed.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    complete = list_complete(run_dir)
    if not complete:
        return []
    kept = {folder for _, folder in complete[-keep:]}
    newest = complete[-1][0]
    removed = [folder for iteration, folder in _list_all(run_dir) if iteration <= newest and folder not in kept]
    for folder in removed:
        # The mark goes first, so that a crash in between leaves no half checkpoint that counts as complete.
        (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return removed


def _list_all(run_dir: Path) -> list[tuple[int, Path]]:
    root = run_dir / FOLDER
    if not root.is_dir():
        return []
    matches = ((_STEP.fullmatch(folder.name), folder) for folder in root.iterdir() if folder.is_dir())
    return sorted((int(match[1]), folder) for match, folder in matches if match is not None)
