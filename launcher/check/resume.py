"""Checks the folder that a run writes to, or resumes from."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coordinator.data.repeated_prompts import OLD_ORDER, Repeats, texts_of
from coordinator.data.scan import Scan
from coordinator.record.resuming import UNUSED, order_differences, order_of, reward_facts, reward_warning
from coordinator.record.state import RunState
from launcher.check.data.rows import CheckedData
from launcher.check.host import is_writable
from servicekit.errors import ConfigError
from tandem_clients.formatting import TOOLS_SETTING, PromptFormat
from tandem_config.comparing.described import base_key
from tandem_config.comparing.resuming import RUN_ID, UNRECORDED, compare, in_one_list
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import COORDINATOR_FILE, TRAINER_FOLDER, newest_sound, read_complete
from tandem_files.model.fingerprint import model_fingerprint
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_folder import RunIdentity, busy_message, is_locked, read_identity
from trainer_service.identity import differences, identity
from weightsync.model.spec import ModelSpec

TRAINER_META = f"{TRAINER_FOLDER}/meta.json"
MODEL_NOTE = "model.json"
# In the warning of a checkpoint from before 0.2; rows that it names.
_OLD_READING = "reading of answers: unset"
_NAMED = 5


def check_output(config: RunConfig) -> Iterator[ConfigProblem]:
    """Check that the output folder, or its nearest existing parent, is a writable folder."""
    folder = config.run.output_dir
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        yield problem("run.output_dir", folder, f"{existing} is a file", "choose another folder")
    elif not is_writable(existing):
        yield problem("run.output_dir", folder, f"{existing} is not writable", "choose another folder")


def check_resume(
    run_dir: Path, config: RunConfig, spec: ModelSpec | None, data: CheckedData | None = None
) -> Iterator[ConfigProblem]:
    """Check that the folder is of an unfinished run that does not run now, with a sound checkpoint that fits `config`.

    Reads every file of the checkpoint, to compare it with its digest.

    Args:
        spec: the configuration's model; None: models are not compared.
        data: the configuration's data; None: they are not compared.
    """
    if not (run_dir / RESOLVED_CONFIG).is_file():
        kind = f"has no {RESOLVED_CONFIG}, so it is not a run's folder" if run_dir.is_dir() else "no such folder"
        yield problem("--resume", run_dir, kind, _runs_beside(run_dir))
        return
    if is_locked(run_dir):
        yield problem("--resume", run_dir, busy_message(run_dir))
        return
    try:
        sound = newest_sound(run_dir)
    except ConfigError as error:
        yield problem("--resume", run_dir, str(error))
        return
    if sound is None:
        yield problem("--resume", run_dir, "has no complete checkpoint to resume from", "start anew without --resume")
        return
    for complaint in sound.complaints():
        yield problem("--resume", run_dir, complaint, severity="warning")
    if sound.iteration >= config.run.iterations:
        message = f"has already finished its {config.run.iterations} iterations"
        more = f"--set run.iterations={sound.iteration + 10} adds ten more"
        weights = f"tandem export {run_dir} --out DIR writes its weights"
        yield problem("--resume", run_dir, message, f"{more}; {weights}")
    mark = read_complete(sound.folder)
    # A folder that does not say whose it is becomes that of the checkpoint's run.
    owner = read_identity(run_dir) or RunIdentity(run_id=str(mark.get(RUN_ID, "")))
    comparison = compare(mark, config, replace(owner, launch_id=run_dir.name))
    if not comparison.recorded:
        yield problem("--resume", run_dir, UNRECORDED, severity="warning")
    yield from _check_same(run_dir, sound.folder, comparison.refused, config, spec, data)
    if not any(base_key(text.partition(":")[0]).startswith("reward.") for text in comparison.refused):
        yield from _check_rewards(run_dir, sound.folder, config, data)
    yield from _check_order(run_dir, sound.folder, config, [] if data is None else data.train)


def note_model(run_dir: Path, spec: ModelSpec) -> None:
    """Record the sizes of the run's model, for `check_resume`."""
    (run_dir / MODEL_NOTE).write_text(json.dumps(asdict(spec), indent=2) + "\n", encoding="utf-8")


def _check_same(
    run_dir: Path,
    checkpoint: Path,
    refused: Sequence[str],
    config: RunConfig,
    spec: ModelSpec | None,
    data: CheckedData | None,
) -> Iterator[ConfigProblem]:
    """Report all differences between checkpoint and configuration that forbid a resume, as one problem.

    Args:
        refused: settings that must stay, and differ.
    """
    different = [] if spec is None else _model_differences(run_dir, checkpoint, config.model.path, spec)
    if spec is not None and (checkpoint / TRAINER_META).is_file():
        meta = json.loads((checkpoint / TRAINER_META).read_text(encoding="utf-8"))
        own = identity(config, spec)
        # Where the models differ already, their sizes are not listed twice.
        different += differences(meta, {key: value for key, value in own.items() if key != "model" or not different})
    if data is not None and data.formats is not None and data.train and (checkpoint / COORDINATOR_FILE).is_file():
        different += _data_differences(checkpoint, config, data, data.formats)
    different = in_one_list(different, refused)
    if different:
        yield problem(
            "--resume",
            run_dir,
            f"cannot resume from {checkpoint.name} with this configuration: {'; '.join(different)}",
            "leave these settings as they were (docs/configuration.md, Resuming, says what may change), "
            "or start a new run",
        )


def _check_rewards(
    run_dir: Path, checkpoint: Path, config: RunConfig, data: CheckedData | None
) -> Iterator[ConfigProblem]:
    """Warn of rewards that are not those of the checkpoint; what cannot be read is reported elsewhere."""
    try:
        saved = RunState.load(checkpoint / COORDINATOR_FILE).rewards
        warning = reward_warning(saved, reward_facts(config))
    except (ConfigError, OSError):
        return
    if not warning:
        return
    rows = data.answers.read_otherwise() if data is not None and data.answers and _OLD_READING in warning else []
    named = ", ".join(f"{file.name}:{number}" for file, number in rows[:_NAMED])
    of_rows = f"; rows that were read otherwise: {named}{', ...' if len(rows) > _NAMED else ''}" if named else ""
    yield problem("--resume", run_dir, warning + of_rows, severity="warning")


def _check_order(run_dir: Path, checkpoint: Path, config: RunConfig, train: Sequence[Scan]) -> Iterator[ConfigProblem]:
    """Warn of a run that draws copies of prompts as an older release did, which it has to keep."""
    repeats = any(Repeats.of(texts_of([scan])).most > 1 for scan in train)
    try:
        is_old = repeats and RunState.load(checkpoint / COORDINATOR_FILE).cursor.order == "rows"
    except (ConfigError, OSError):
        return
    if is_old and config.data.shuffle:
        yield problem("--resume", run_dir, OLD_ORDER, severity="warning")


def _model_differences(run_dir: Path, checkpoint: Path, model: Path, spec: ModelSpec) -> list[str]:
    """Compare the checkpoint's fingerprint with the model's; the recorded sizes say where two models differ."""
    try:
        mark, fingerprint = read_complete(checkpoint), model_fingerprint(model)
    except (OSError, ValueError):
        return []  # an unreadable model folder has been reported already
    if mark.get("model_fingerprint") == fingerprint:
        return []
    sizes = ", ".join(_size_differences(run_dir, spec)[:4])
    return [f"it is of another model ({mark.get('model')}) than {model}" + (f": {sizes}" if sizes else "")]


def _data_differences(checkpoint: Path, config: RunConfig, data: CheckedData, formats: PromptFormat) -> list[str]:
    try:
        state = RunState.load(checkpoint / COORDINATOR_FILE)
    except ConfigError as error:
        return [str(error)]
    order = order_of(config, data.train, formats)
    if config.environment is not None and data.episodes is None and state.order is not None:
        # It could not be loaded here; a server may be started with the run. The coordinator compares its tools.
        tools = state.order.settings.get(TOOLS_SETTING, UNUSED)
        order = order.model_copy(update={"settings": {**order.settings, TOOLS_SETTING: tools}})
    return order_differences(state, order)


def _size_differences(run_dir: Path, spec: ModelSpec) -> list[str]:
    try:
        noted: dict[str, Any] = json.loads((run_dir / MODEL_NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    # As read from JSON: tuples are lists there.
    own: dict[str, Any] = json.loads(json.dumps(asdict(spec)))
    return [
        f"{name} {noted.get(name)} in the run, {value} in the configuration"
        for name, value in own.items()
        if noted.get(name) != value
    ]


def _runs_beside(run_dir: Path) -> str:
    parent = run_dir.parent
    runs = sorted(entry.parent.name for entry in parent.glob(f"*/{RESOLVED_CONFIG}"))[:5] if parent.is_dir() else []
    return f"runs beside it: {', '.join(runs)}" if runs else "give a folder that `tandem run` has made"
