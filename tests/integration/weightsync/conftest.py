"""Fleets of real SyncMembers over real Redis and gloo."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.kit.fleet import Fleet
from tests.kit.stores import tiny_spec
from weightsync.layouts.layout import Parallel


@pytest.fixture
def fleet(redis_server: str) -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:

        def make(trainer: Parallel, replicas: dict[str, Parallel], **spec: Any) -> Fleet:
            return stack.enter_context(Fleet(redis_server, tiny_spec(**spec), trainer, replicas))

        yield make


@pytest.fixture
def four(fleet: Callable[..., Fleet]) -> Fleet:
    """Two trainer ranks, and two replicas of one rank each."""
    return fleet(Parallel(tensor=2), {"rollout-0": Parallel(), "rollout-1": Parallel()})
