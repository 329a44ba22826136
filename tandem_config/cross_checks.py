"""Checks across keys that need no file; a check is skipped if one of the keys that it reads is invalid."""

from collections.abc import Callable, Iterator

from tandem_config.checks import data, evaluation, fleet, grpo, objective, profile, reward, rollout, trackers, trainer
from tandem_config.checks.registry import CHECKS
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig

# Imported for their checks, which they register.
_PARTS = (data, evaluation, fleet, grpo, objective, profile, reward, rollout, trackers, trainer)


def cross_check(config: RunConfig, usable: Callable[..., bool]) -> Iterator[ConfigProblem]:
    """Find problems between keys that are valid on their own.

    Args:
        usable: whether all of the given keys have valid values; otherwise the check is skipped.
    """
    for check in CHECKS:
        if usable(*check.keys):
            yield from check.find(config)
