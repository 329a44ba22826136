"""Checks of the data and what is measured on them."""

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_config.sections.evaluation import HELDOUT


@check("run.target_accuracy", "data.heldout", "evaluation.sets")
def _target_needs_heldout(config: RunConfig) -> ConfigProblem | None:
    if config.run.target_accuracy is None or HELDOUT in [chosen.name for chosen in config.evaluation_sets()]:
        return None
    return ConfigProblem(
        key="run.target_accuracy",
        value=str(config.run.target_accuracy),
        message=f"needs data.heldout, or a set in evaluation.sets that is called {HELDOUT}: without it no accuracy is "
        "measured and the run would never stop early",
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
