"""The list of all checks across keys, which the modules next to this one fill when they are imported."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig

Problems = Iterator[ConfigProblem]
Find = Callable[[RunConfig], Problems]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check, and the keys that it reads."""

    keys: tuple[str, ...]
    find: Find


CHECKS: list[Check] = []


def check(*keys: str) -> Callable[[Find], Find]:
    """Register a function that finds problems between keys that are valid on their own; it reads only these keys."""

    def register(find: Find) -> Find:
        CHECKS.append(Check(keys=keys, find=find))
        return find

    return register
