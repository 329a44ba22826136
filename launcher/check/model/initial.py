"""Checks trainer.initial_checkpoint as the trainer will, but reads its small files only."""

from collections.abc import Iterator

from servicekit.errors import ConfigError
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import TRAINER_FOLDER
from tandem_files.digests import size_damages
from trainer_service.checkpoints.files import META, fitting_meta, parallel_of, read_digests
from trainer_service.identity import identity
from weightsync.model.spec import ModelSpec


def check_initial(config: RunConfig, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """Check that a new run can start from trainer.initial_checkpoint: all files are there, of this model and type."""
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
        yield ConfigProblem(
            key="trainer.initial_checkpoint", value=str(folder), message="; ".join(faults), suggestion=suggestion
        )


def _unfit(config: RunConfig, spec: ModelSpec) -> Iterator[str]:
    folder = config.trainer.initial_checkpoint
    if folder is not None:
        try:
            parallel_of(folder, fitting_meta(folder, identity(config, spec)))
        except ConfigError as error:
            yield str(error)
