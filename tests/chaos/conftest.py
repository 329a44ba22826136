"""The fleet of real processes that chaos tests share."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.chaos.fleet import ChaosFleet, chaos_fleet


class Fleets:
    """The fleet that cells share; one that a failed cell has left in disorder is replaced."""

    def __init__(self) -> None:
        self._current: ChaosFleet | None = None
        self._stack = ExitStack()

    @contextmanager
    def whole(self) -> Iterator[ChaosFleet]:
        """A fleet in which all replicas serve; a test that fails inside brings the processes' logs."""
        if self._current is None:
            self._current = self._stack.enter_context(chaos_fleet())
        fleet = self._current
        fleet.use_as_at_first()
        try:
            yield fleet
        except BaseException as error:
            error.add_note(fleet.logs())
            self.drop()
            raise

    def drop(self) -> None:
        self._current = None
        self._stack.close()


@pytest.fixture(scope="session")
def fleets() -> Iterator[Fleets]:
    fleets = Fleets()
    yield fleets
    fleets.drop()
