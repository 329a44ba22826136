"""Checks the folder that a run writes to, or goes on from."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coordinator.fingerprint import model_fingerprint
from launcher.run_folder import RESOLVED_CONFIG, busy_message, is_locked
from servicekit.checkpoints import list_complete, read_complete
from servicekit.errors import ConfigError
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from weightsync.model_spec import ModelSpec

MODEL_NOTE = "model.json"


def check_output(config: RunConfig) -> Iterator[ConfigProblem]:
    """The output folder, or the folder in which it will be made, must be a writable folder."""
    folder = config.run.output_dir
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        yield _problem("run.output_dir", folder, f"{existing} is a file", "choose another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield _problem("run.output_dir", folder, f"no permission to write in {existing}", "choose another folder")


def check_resume(run_dir: Path, config: RunConfig, spec: ModelSpec | None) -> Iterator[ConfigProblem]:
    """The folder must be a run's, not running now, unfinished, with a checkpoint of the same model."""
    if not (run_dir / RESOLVED_CONFIG).is_file():
        kind = f"has no {RESOLVED_CONFIG}, so it is not a run's folder" if run_dir.is_dir() else "no such folder"
        yield _problem("--resume", run_dir, kind, _runs_beside(run_dir))
        return
    if is_locked(run_dir):
        yield _problem("--resume", run_dir, busy_message(run_dir), "")
    complete = list_complete(run_dir)
    if not complete:
        yield _problem("--resume", run_dir, "has no complete checkpoint to go on from", "start anew without --resume")
    elif complete[-1][0] >= config.run.iterations:
        message = f"has already finished its {config.run.iterations} iterations"
        yield _problem("--resume", run_dir, message, f"--set run.iterations={complete[-1][0] + 10} adds ten more")
    if spec is not None and complete:
        yield from _check_same_model(run_dir, complete[-1][1], config.model.path, spec)


def note_model(run_dir: Path, spec: ModelSpec) -> None:
    """Write down which model the run is of, for `check_resume`."""
    (run_dir / MODEL_NOTE).write_text(json.dumps(asdict(spec), indent=2) + "\n", encoding="utf-8")


def _check_same_model(run_dir: Path, newest: Path, model: Path, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """The checkpoint's fingerprint decides; the noted sizes say where two models differ."""
    try:
        mark, fingerprint = read_complete(newest), model_fingerprint(model)
    except ConfigError as error:
        yield _problem("--resume", run_dir, str(error), "")
        return
    except (OSError, ValueError):
        return  # an unreadable model folder has been reported already
    if mark.get("model_fingerprint") == fingerprint:
        return
    different = _differences(run_dir, spec)
    details = f": {', '.join(different[:4])}" if different else ""
    yield _problem(
        "--resume",
        run_dir,
        f"is a run of another model ({mark.get('model')}) than {model}{details}",
        "resume with the model that the run was started with, or start a new run",
    )


def _differences(run_dir: Path, spec: ModelSpec) -> list[str]:
    try:
        noted: dict[str, Any] = json.loads((run_dir / MODEL_NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [
        f"{name} {noted.get(name)} there, {value} here"
        for name, value in asdict(spec).items()
        if noted.get(name) != value
    ]


def _runs_beside(run_dir: Path) -> str:
    parent = run_dir.parent
    runs = sorted(entry.parent.name for entry in parent.glob(f"*/{RESOLVED_CONFIG}"))[:5] if parent.is_dir() else []
    return f"runs there: {', '.join(runs)}" if runs else "give a folder that `tandem run` has made"


def _problem(key: str, path: Path, message: str, suggestion: str) -> ConfigProblem:
    return ConfigProblem(key=key, value=str(path), message=message, suggestion=suggestion)
