"""The table of a round, the guard and the deadlines that are made of it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servicekit.errors import PhaseOrder
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round import deadlines
from weightsync.round.guard import OpenRound, require
from weightsync.round.phases import (
    ABORT,
    COMMIT,
    PAUSE,
    PHASES,
    PREPARE,
    RULES,
    TRANSFER,
    VERIFY,
    Phase,
    Role,
    rules_of,
)

STAGED, IN_PLACE = pb.INSTALL_MODE_STAGED, pb.INSTALL_MODE_IN_PLACE


def a_round(install: pb.InstallMode.ValueType = IN_PLACE) -> pb.Round:
    return pb.Round(round_id="r", install_mode=install)


def test_every_phase_of_the_wire_has_a_rule() -> None:
    assert set(RULES) == {*pb.RoundPhase.values()} - {pb.ROUND_PHASE_UNSPECIFIED}
    assert list(PHASES) == sorted(PHASES)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("install", [STAGED, IN_PLACE])
def test_a_round_in_order_passes_and_any_other_order_does_not(role: Role, install: pb.InstallMode.ValueType) -> None:
    own = [rule.phase for rule in rules_of(staged=install == STAGED) if role in rule.roles]
    current = OpenRound(message=a_round(install), role=role)
    for place, phase in enumerate(own):
        for later in own[place + 1 :]:
            with pytest.raises(PhaseOrder, match="has not done"):
                require(current, later, current.message)
        assert require(current, phase, current.message) is current
        current.done.add(phase)


@pytest.mark.parametrize(
    ("role", "install", "phase", "missing"),
    [
        (Role.REPLICA, IN_PLACE, TRANSFER, "PAUSE"),
        (Role.REPLICA, IN_PLACE, COMMIT, "PAUSE, TRANSFER, VERIFY"),
        (Role.RANK, IN_PLACE, COMMIT, "TRANSFER, VERIFY"),
        (Role.SENDER, IN_PLACE, COMMIT, "TRANSFER"),
        (Role.REPLICA, STAGED, COMMIT, "TRANSFER, VERIFY"),
    ],
)
def test_what_is_missing_is_named(role: Role, install: pb.InstallMode.ValueType, phase: Phase, missing: str) -> None:
    current = OpenRound(message=a_round(install), role=role, done={PREPARE})
    with pytest.raises(PhaseOrder, match=f"has not done {missing}$"):
        require(current, phase, current.message)


def test_a_staged_replica_needs_no_pause() -> None:
    current = OpenRound(message=a_round(STAGED), role=Role.REPLICA, done={PREPARE})
    assert require(current, TRANSFER, current.message) is current


def test_no_round_another_round_and_a_failed_round_are_refused() -> None:
    failed = OpenRound(message=a_round(), role=Role.RANK, done={PREPARE}, failure="TRANSFER did not end")
    with pytest.raises(PhaseOrder, match="slot 3: TRANSFER: round 'r' is not open here"):
        require(None, TRANSFER, a_round(), "slot 3: ")
    with pytest.raises(PhaseOrder, match="round 'other' is not open here"):
        require(failed, VERIFY, pb.Round(round_id="other"))
    with pytest.raises(PhaseOrder, match=r"has failed \(TRANSFER did not end\); abort it"):
        require(failed, TRANSFER, failed.message)
    with pytest.raises(PhaseOrder, match="99 is no phase of a round"):
        require(failed, 99, failed.message)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "transfer_s", "expected_s"),
    [(PREPARE, 60.0, 35.0), (TRANSFER, 60.0, 65.0), (COMMIT, 60.0, 65.0), (ABORT, 60.0, 15.0), (ABORT, 2.0, 7.0)],
)
def test_a_rank_may_take_the_rounds_deadlines_and_an_abort_less(
    phase: Phase, transfer_s: float, expected_s: float
) -> None:
    assert deadlines.rank_s(phase, pb.Round(formation_timeout_s=30.0, transfer_timeout_s=transfer_s)) == expected_s


@given(phase=st.sampled_from(sorted(RULES)), formation_s=st.floats(0.001, 86_400), transfer_s=st.floats(0.001, 86_400))
def test_whoever_waits_for_another_waits_longer(phase: Phase, formation_s: float, transfer_s: float) -> None:
    """So that the cause of a failure arrives, and not the deadline of one who waits for it."""
    round_ = pb.Round(formation_timeout_s=formation_s, transfer_timeout_s=transfer_s)
    chain = [
        deadlines.work_s(phase, round_),
        deadlines.work_s(phase, round_) + deadlines.WATCH_MARGIN_S,
        deadlines.rank_s(phase, round_),
        deadlines.host_s(phase, round_),
        deadlines.call_s(round_),
        deadlines.silence_s(round_),
    ]
    assert all(longer > shorter for shorter, longer in pairwise(chain))
    assert deadlines.work_s(phase, round_) < deadlines.command_s(round_) < deadlines.call_s(round_)
    assert deadlines.drain_s(round_) + deadlines.END_CALLS_S < deadlines.call_s(round_)
    assert deadlines.DRAIN_S + deadlines.END_CALLS_S < deadlines.CALL_PAUSE_S
    assert deadlines.RANK_LOAD_S < deadlines.HOST_LOAD_S < deadlines.CALL_LOAD_S
    assert deadlines.RANK_CHECKSUM_S < deadlines.HOST_CHECKSUM_S


def test_only_replicas_pause() -> None:
    assert RULES[PAUSE].roles == {Role.REPLICA}
