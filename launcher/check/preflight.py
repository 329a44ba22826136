"""Finds everything that can be known to be wrong before a process starts, and reports all of it together.

`tandem_config` checks the configuration itself; this package adds the files, the host and the run's folder.
"""

from collections.abc import Iterator
from pathlib import Path

from coordinator.data.scan_cache import RowIndex
from launcher.check.data.rows import check_data
from launcher.check.data.tokenizer import check_tokenizer
from launcher.check.environment import check_environment, load_environment
from launcher.check.host import check_host
from launcher.check.model.folder import check_model
from launcher.check.resume import check_output, check_resume
from launcher.check.rewards import check_rewards
from launcher.check.trackers import check_trackers
from servicekit.errors import ConfigError
from tandem_config.loading import Draft
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import TRAINER_FOLDER
from tandem_files.digests import size_damages
from trainer_service.checkpoints.files import META, fitting_meta, parallel_of, read_digests
from trainer_service.identity import identity
from weightsync.model.spec import ModelSpec


def preflight(
    draft: Draft,
    *,
    redis_url: str | None,
    resume: Path | None = None,
    indices: list[RowIndex] | None = None,
    notes: list[str] | None = None,
    trainer_ranks: int | None = None,
) -> list[ConfigProblem]:
    """Return the errors and warnings of a drafted configuration, those of its text first.

    Args:
        draft: result of `draft_config`; keys that are invalid there are not checked again.
        redis_url: REDIS_URL if the user gave one.
        resume: folder of the run to resume.
        indices: gets where the rows of the data lie, for the coordinator.
        notes: gets lines about the data that are no problems.
        trainer_ranks: None: those of the configuration.
    """
    if draft.config is None:
        return list(draft.problems)
    problems: list[ConfigProblem] = []
    spec = None
    if draft.usable("model.path"):
        spec, found = check_model(draft.config, draft.usable)
        problems += found
        # A run that resumes does not read it again.
        if spec is not None and resume is None and draft.usable("trainer.initial_checkpoint", "model.dtype"):
            problems += _check_initial(draft.config, spec)
        codec, found = check_tokenizer(draft.config, spec)
        problems += found
    else:
        codec = None
    episodes, found = load_environment(draft.config, draft.usable)
    problems += found
    data = check_data(draft.config, draft.usable, spec, codec, episodes)
    problems += data.problems
    if indices is not None:
        indices += data.indices
    problems += check_rewards(draft.config, draft.usable, data)
    problems += check_environment(draft.config, draft.usable, spec, data)
    if notes is not None:
        notes += data.notes
    problems += check_host(draft.config, redis_url, trainer_ranks=trainer_ranks)
    problems += check_trackers(draft.config) if draft.usable("trackers") else ()
    problems += check_output(draft.config) if resume is None else check_resume(resume, draft.config, spec, data)
    return [*draft.problems, *draft.placed(problems)]


def _check_initial(config: RunConfig, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """Check that a new run can start from trainer.initial_checkpoint: all files are there, of this model and type.

    Reads the folder as the trainer will, but its small files only.
    """
    folder = config.trainer.initial_checkpoint
    if folder is None:
        return
    digests, faults = read_digests(folder)
    faults = faults or size_damages(folder, digests)
    suggestion = "give a folder of `tandem import`, or trainer/ in a checkpoint of a run of the same model"
    if (folder / TRAINER_FOLDER / META).is_file():
        faults, suggestion = ["is a whole checkpoint, not the trainer's part"], f"give {folder / TRAINER_FOLDER}"
    elif not faults:
        suggestion = f"{suggestion}, of this model.dtype; or leave it out, to start from model.path"
        faults = list(_unfit(config, spec))
    if faults:
        yield problem("trainer.initial_checkpoint", folder, "; ".join(faults), suggestion)


def _unfit(config: RunConfig, spec: ModelSpec) -> Iterator[str]:
    folder = config.trainer.initial_checkpoint
    if folder is not None:
        try:
            parallel_of(folder, fitting_meta(folder, identity(config, spec)))
        except ConfigError as error:
            yield str(error)
