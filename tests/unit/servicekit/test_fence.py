"""Whose calls are refused once another coordinator has been seen."""

import pytest

from servicekit.errors import Fenced
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
