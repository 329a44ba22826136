"""Cases that are computed together: the fast ones, and those that only `make test-all` asks for."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import pytest

Case = TypeVar("Case")


class Groups(Generic[Case]):
    """Computes a group of cases when one of them is asked for.

    Args:
        compute: writes the results of all cases of a group.
    """

    def __init__(self, compute: Callable[[list[Case]], None], *groups: Sequence[Case]) -> None:
        self._compute = compute
        self._left = [list(group) for group in groups]

    def need(self, case: Case) -> None:
        """Compute the group of this case, unless that was done."""
        for group in [group for group in self._left if case in group]:
            self._left.remove(group)
            self._compute(group)


def parametrized(argument: str, fast: Sequence[Any], slow: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by cases that have a name."""
    marked = [pytest.param(case, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize(argument, [*fast, *marked], ids=lambda case: case.name)
