"""Checks of the data and what is measured on them."""

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig


@check("run.target_accuracy", "data.heldout")
def _target_needs_heldout(config: RunConfig) -> ConfigProblem | None:
    if config.run.target_accuracy is None or config.data.heldout is not None:
        return None
    return ConfigProblem(
        key="run.target_accuracy",
        value=str(config.run.target_accuracy),
        message="needs data.heldout: without it no accuracy is measured and the run would never stop early",
        suggestion="set data.heldout, or run.target_accuracy: null",
    )


@check("data.train", "data.heldout")
def _heldout_is_other_data(config: RunConfig) -> ConfigProblem | None:
    if config.data.heldout is None or config.data.heldout != config.data.train:
        return None
    return ConfigProblem(
        key="data.heldout",
        value=str(config.data.heldout),
        message="is the training file, so the held-out accuracy will measure memorization",
        suggestion="use rows that are not trained on",
        severity="warning",
    )
