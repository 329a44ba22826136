"""Fleets of real SyncMembers over real Redis and gloo."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kit.stores import tiny_spec
from tests.sync_fleet import Fleet
from weightsync.layouts.layout import Parallel


@pytest.fixture
def fleet(redis_server: str) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(trainer: Parallel, replicas: dict[str, Parallel], **spec: Any) -> Fleet:
        made.append(Fleet(redis_server, tiny_spec(**spec), trainer, replicas))
        return made[-1]

    yield make
    for one in made:
        one.close()
