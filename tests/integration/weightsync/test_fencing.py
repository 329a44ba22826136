"""A late word of an older round, or of a coordinator that was replaced, changes nothing on a rank."""

from collections.abc import Callable

import pytest

from servicekit.errors import Fenced, PhaseOrder, Unavailable
from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import Fleet
from tests.kit.stores import same
from weightsync.layouts.layout import Parallel
from weightsync.membership.rendezvous import COORDINATOR_SLOT
from weightsync.round.phases import PHASES

pytestmark = pytest.mark.integration
ABORT = pb.ROUND_PHASE_ABORT
MEMBERS = ("trainer/0", "rollout-0/0")


def two(fleet: Callable[..., Fleet]) -> Fleet:
    return fleet(Parallel(), {"rollout-0": Parallel()})


def run(them: Fleet, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> None:
    failed = [answer for answer in them.run(phase, round_).values() if isinstance(answer, Exception)]
    assert not failed, failed


def test_an_abort_of_another_round_changes_nothing(fleet: Callable[..., Fleet]) -> None:
    """After any phase: of an older epoch's, of one of this epoch that came late, and of one that nobody knows."""
    them = two(fleet)
    last = them.round(1)
    them.sync(last)
    for version, after in enumerate(PHASES[:-1], 2):
        older = them.round(version, round_id=f"older-{version}")
        older.epoch -= 3
        current = them.round(version)
        for phase in PHASES:
            run(them, phase, current)
            if phase == after:
                for late in (older, last, them.round(version, round_id=f"unknown-{version}")):
                    assert not any(isinstance(answer, Exception) for answer in them.run(ABORT, late).values())
        last = current
    assert same(them.stores["rollout-0/0"], them.expected("rollout-0/0")) == []


def test_a_round_that_was_given_up_does_not_begin_after_all(fleet: Callable[..., Fleet]) -> None:
    """Its PREPARE comes behind its ABORT, in the middle of the next round."""
    them = two(fleet)
    given_up, current = them.round(1, round_id="given-up"), them.round(1)
    for slot in MEMBERS:
        them.members[slot].run_phase(ABORT, given_up)
    run(them, pb.ROUND_PHASE_PREPARE, current)
    with pytest.raises(PhaseOrder, match="given-up is over"):
        them.members["trainer/0"].run_phase(pb.ROUND_PHASE_PREPARE, given_up)
    for phase in PHASES[1:]:
        run(them, phase, current)


def test_a_round_after_one_that_failed_elsewhere_meets_anew(fleet: Callable[..., Fleet]) -> None:
    """The trainer never heard of the round that made the replica give its communicator up."""
    them = two(fleet)
    them.sync(them.round(1))
    failed = them.round(2, round_id="failed", formation_timeout_s=0.3)
    assert them.run_each(pb.ROUND_PHASE_PREPARE, {"rollout-0/0": failed})
    for slot in MEMBERS:
        them.members[slot].run_phase(ABORT, failed)
    them.sync(them.round(3, failed_rounds=1))


def test_a_token_that_redis_does_not_know_locks_nobody_out(fleet: Callable[..., Fleet]) -> None:
    them = two(fleet)
    leader = CoordinatorFence(worker_id="a", token=them.group.lead(COORDINATOR_SLOT, "a", 60.0))
    made_up = CoordinatorFence(worker_id="x", token=leader.token + 1)
    for phase in (pb.ROUND_PHASE_PREPARE, ABORT):
        for answer in them.run(phase, them.round(1, round_id="made-up", fence=made_up)).values():
            assert isinstance(answer, Unavailable)
    them.sync(them.round(1, fence=leader))
    assert same(them.stores["rollout-0/0"], them.expected("rollout-0/0")) == []


def test_a_coordinator_that_was_replaced_changes_nothing(fleet: Callable[..., Fleet]) -> None:
    """In any phase: it had come as far as that one when its successor began a round."""
    them = two(fleet)
    for turn, phase in enumerate([*PHASES, ABORT]):
        old = them.round(1, round_id=f"old-{turn}", fence=CoordinatorFence(worker_id="a", token=2 * turn + 1))
        new = them.round(2, round_id=f"new-{turn}", fence=CoordinatorFence(worker_id="b", token=2 * turn + 2))
        for each in PHASES[: PHASES.index(phase)] if phase in PHASES else PHASES[:3]:
            run(them, each, old)
        run(them, pb.ROUND_PHASE_PREPARE, new)
        for answer in them.run(phase, old).values():
            assert isinstance(answer, Fenced)
            assert f"coordinator a (token {2 * turn + 1}) no longer leads the run: coordinator b" in str(answer)
        for each in PHASES[1:]:
            run(them, each, new)
        assert same(them.stores["rollout-0/0"], them.expected("rollout-0/0")) == []
