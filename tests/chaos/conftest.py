"""The fleet of real processes that chaos tests share."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.fleet import ChaosFleet
from tests.kit.redis import RedisProcess


class Fleets:
    """The fleet that cells share; one that a failed cell has left in disorder is replaced."""

    def __init__(self) -> None:
        self._current: ChaosFleet | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @contextmanager
    def whole(self) -> Iterator[ChaosFleet]:
        """A fleet in which all replicas serve; a test that fails inside brings the processes' logs."""
        started = self._current is not None
        fleet = self._fleet()
        fleet.use_as_at_first()
        try:
            if not started:
                fleet.start()
            yield fleet
        except BaseException as error:
            logs = fleet.logs()
            self.drop()
            error.add_note(logs)
            raise

    def _fleet(self) -> ChaosFleet:
        if self._current is None:
            self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
            redis = RedisProcess()
            redis.start()
            self._current = ChaosFleet(Path(self._folder.name), redis)
        return self._current

    def drop(self) -> None:
        if self._current is not None and self._folder is not None:
            self._current.close()
            self._current.redis.close()
            self._folder.cleanup()
        self._current = None


@pytest.fixture(scope="session")
def fleets() -> Iterator[Fleets]:
    fleets = Fleets()
    yield fleets
    fleets.drop()
