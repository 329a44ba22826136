"""Whose calls are refused once another coordinator has been seen."""

import asyncio
import threading
import time

import pytest

from servicekit.errors import Fenced, Unavailable
from servicekit.rpc.fence import FenceGuard
from tandem_api.common.v1.common_pb2 import CoordinatorFence


def test_an_older_coordinator_is_refused_by_name_and_the_newest_stays() -> None:
    guard = FenceGuard()
    guard.admit(CoordinatorFence(worker_id="a", token=7))
    guard.admit(CoordinatorFence(worker_id="b", token=9))
    with pytest.raises(Fenced, match=r"coordinator a \(token 7\) no longer leads the run: coordinator b \(token 9\)"):
        guard.admit(CoordinatorFence(worker_id="a", token=7))
    guard.admit(CoordinatorFence(worker_id="b", token=9))


def test_a_caller_without_a_fence_is_admitted_until_a_coordinator_has_come() -> None:
    guard = FenceGuard()
    guard.admit(CoordinatorFence())
    guard.admit(CoordinatorFence(worker_id="a", token=1))
    with pytest.raises(Fenced, match="a caller without a fence no longer leads the run: coordinator a"):
        guard.admit(CoordinatorFence())


def test_a_service_that_starts_refuses_older_ones_than_it_is_told_of() -> None:
    guard = FenceGuard()
    guard.remember(CoordinatorFence())
    guard.admit(CoordinatorFence())
    for told in (CoordinatorFence(worker_id="b", token=8), CoordinatorFence(worker_id="a", token=7)):
        guard.remember(told)
    with pytest.raises(Fenced, match=r"coordinator a \(token 7\) no longer leads the run: coordinator b \(token 8\)"):
        guard.admit(CoordinatorFence(worker_id="a", token=7))
    guard.admit(CoordinatorFence(worker_id="b", token=8))


def test_the_same_coordinator_may_come_again_with_a_newer_token() -> None:
    """As after a lease that had run out and that nobody else took."""
    guard = FenceGuard()
    guard.admit(CoordinatorFence(worker_id="a", token=7))
    guard.admit(CoordinatorFence(worker_id="a", token=8))
    with pytest.raises(Fenced):
        guard.admit(CoordinatorFence(worker_id="b", token=7))


FAR = 2**53
SOON = int(time.time() * 1000) + 3_600_000  # of a clock that is an hour ahead
DOWN = Unavailable("Redis failed: nobody answers")


@pytest.mark.parametrize(
    ("redis", "token", "refused"),
    [
        (9, 9, ""),
        (10, 9, ""),  # its successor leads already, and has not called yet
        (SOON, SOON, ""),
        (FAR, FAR, ""),
        (7, 8, "as Redis has it, coordinator r .token 7. leads the run"),
        (7, SOON, "as Redis has it"),
        (7, FAR, "as Redis has it"),
        (0, SOON, ""),  # Redis has lost its data
        (0, FAR, "no clock has given such a token"),
        (DOWN, SOON, ""),
        (DOWN, FAR, "no clock has given such a token"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "token",  # the same in each worker: SOON is not
)
def test_a_newer_coordinator_is_believed_if_redis_knows_it(redis: int | Unavailable, token: int, refused: str) -> None:
    asked: list[int] = []

    def ask() -> CoordinatorFence:
        asked.append(token)
        if isinstance(redis, Unavailable):
            raise redis
        return CoordinatorFence(worker_id="r", token=redis)

    guard, leader = FenceGuard(ask), CoordinatorFence(worker_id="a", token=7)
    guard.remember(leader)
    if refused:
        with pytest.raises(Unavailable, match=refused):
            guard.admit(CoordinatorFence(worker_id="x", token=token))
        guard.admit(leader)
    else:
        for _ in range(3):
            guard.admit(CoordinatorFence(worker_id="x", token=token))
        with pytest.raises(Fenced, match="coordinator x"):
            guard.admit(leader)
    assert asked == [token]  # nobody else costs a question


async def test_the_loop_goes_on_while_redis_is_asked() -> None:
    loop_is_free = threading.Event()

    def ask() -> CoordinatorFence:
        assert loop_is_free.wait(5)
        return CoordinatorFence(worker_id="b", token=8)

    guard = FenceGuard(ask)
    admitted = asyncio.create_task(guard.admit_soon(CoordinatorFence(worker_id="b", token=8)))
    await asyncio.sleep(0)
    loop_is_free.set()
    await admitted
    with pytest.raises(Fenced):
        await guard.admit_soon(CoordinatorFence(worker_id="a", token=7))
