"""Checks of the list of trackers."""

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig


@check("trackers")
def _one_of_a_kind(config: RunConfig) -> Problems:
    kinds = [tracker.kind for tracker in config.trackers]
    twice = next((kind for place, kind in enumerate(kinds) if kind in kinds[:place]), None)
    if twice is not None:
        yield problem(
            "trackers",
            twice,
            "is listed twice: a run has one of a kind, whose id its folder keeps",
            "remove one of the two",
        )
