"""Checks of the list of trackers."""

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig


@check("trackers")
def _one_of_a_kind(config: RunConfig) -> ConfigProblem | None:
    kinds = [tracker.kind for tracker in config.trackers]
    twice = next((kind for place, kind in enumerate(kinds) if kind in kinds[:place]), None)
    if twice is None:
        return None
    return ConfigProblem(
        key="trackers",
        value=twice,
        message="is listed twice: a run has one of a kind, whose id its folder keeps",
        suggestion="remove one of the two",
    )
