"""The guard of a participant: what any order of phases, rounds and failures leaves, and what repetitions get."""

import gc
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from servicekit.errors import Aborted, PeerLost, PhaseOrder
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round.guard import KEPT_ROUNDS, OpenRound, PhaseGuard
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PHASES, PREPARE, RULES, TRANSFER, VERIFY, Phase, Role

STAGED, IN_PLACE = pb.INSTALL_MODE_STAGED, pb.INSTALL_MODE_IN_PLACE


class Participant:
    """As trainer ranks, replicas and their ranks use the guard; a reply is a number that counts the work done."""

    def __init__(self, role: Role = Role.REPLICA) -> None:
        self.guard = PhaseGuard[OpenRound, int](lambda message: OpenRound(message=message, role=role), "r0: ")
        self.worked: list[tuple[str, Phase]] = []
        self.gave_up: list[str] = []

    def run(self, phase: Phase, round_: pb.Round, fails: Callable[[], None] = lambda: None) -> int:
        reply = self.guard.answer(phase, round_)
        if reply is not None:
            return reply
        if phase == PREPARE and (older := self.guard.superseded_by(round_)) is not None:
            self._abort(older.message)
        if phase == ABORT:
            self._abort(round_)
        else:
            with self.guard.running(phase, round_):
                self.worked.append((round_.round_id, phase))
                fails()
                if phase == COMMIT:
                    self.guard.close(round_)
        reply = len(self.worked)
        self.guard.answered(phase, round_, reply)
        return reply

    def _abort(self, round_: pb.Round) -> None:
        if self.guard.is_open(round_):
            self.gave_up.append(round_.round_id)
        self.guard.close(round_)


def a_round(name: str = "a", epoch: int = 1, install: pb.InstallMode.ValueType = IN_PLACE) -> pb.Round:
    return pb.Round(round_id=name, epoch=epoch, install_mode=install)


def lost() -> None:
    raise PeerLost("trainer/0 went away")


def test_what_is_done_is_answered_again_and_not_done_again() -> None:
    them = Participant()
    first = [them.run(phase, a_round()) for phase in PHASES]
    assert [them.run(phase, a_round()) for phase in PHASES] == first
    assert them.worked == [("a", phase) for phase in PHASES]


def test_a_phase_that_failed_fails_again_alike_and_leaves_abort_only() -> None:
    them = Participant()
    them.run(PREPARE, a_round())
    for _ in range(2):
        with pytest.raises(PeerLost, match="trainer/0 went away"):
            them.run(PAUSE, a_round(), lost)
    assert them.worked == [("a", PREPARE), ("a", PAUSE)]
    with pytest.raises(PhaseOrder, match=r"r0: TRANSFER: round a has failed \(PAUSE failed: .* went away\); abort"):
        them.run(TRANSFER, a_round())
    them.run(ABORT, a_round())
    assert them.gave_up == ["a"]


def test_a_prepare_that_failed_is_given_up_too() -> None:
    them = Participant()
    with pytest.raises(PeerLost):
        them.run(PREPARE, a_round(), lost)
    them.run(ABORT, a_round())
    assert them.gave_up == ["a"]


def test_a_refusal_is_forgotten() -> None:
    them = Participant()
    with pytest.raises(PhaseOrder, match="not open here"):
        them.run(PAUSE, a_round())
    them.run(PREPARE, a_round())
    with pytest.raises(PhaseOrder, match="has not done PAUSE"):
        them.run(TRANSFER, a_round())
    them.run(PAUSE, a_round())
    them.run(TRANSFER, a_round())


@pytest.mark.parametrize("late", [a_round("older", epoch=0), a_round("last"), a_round("unknown")])
@pytest.mark.parametrize("after", PHASES[:-1])
def test_an_abort_of_another_round_changes_nothing(after: Phase, late: pb.Round) -> None:
    them = Participant()
    for phase in PHASES:
        them.run(phase, a_round("last"))
    for phase in PHASES:
        them.run(phase, a_round())
        if phase == after:
            them.run(ABORT, late)
    assert them.gave_up == []


def test_an_abort_behind_its_commit_changes_nothing() -> None:
    them = Participant()
    for phase in (*PHASES, ABORT):
        them.run(phase, a_round())
    assert them.gave_up == []


@pytest.mark.parametrize("end", [(ABORT,), (*PHASES,), (PREPARE, PAUSE, ABORT)])
def test_a_round_opens_once(end: tuple[Phase, ...]) -> None:
    them = Participant()
    for phase in end:
        them.run(phase, a_round())
    for name in map(str, range(KEPT_ROUNDS)):  # its replies are forgotten
        them.run(PREPARE, a_round(name))
    with pytest.raises(PhaseOrder, match="r0: round a is over; start a new one"):
        them.run(PREPARE, a_round())


def test_a_newer_round_ends_the_open_one_and_an_older_epochs_does_not() -> None:
    them = Participant()
    them.run(PREPARE, a_round("a", epoch=5))
    with pytest.raises(Aborted, match="r0: round old is of epoch 4; a of epoch 5 is open"):
        them.run(PREPARE, a_round("old", epoch=4))
    them.run(PREPARE, a_round("b", epoch=5))
    assert them.gave_up == ["a"]
    with pytest.raises(PhaseOrder, match="round 'a' is not open here"):
        them.run(PAUSE, a_round("a", epoch=5))


def test_an_open_round_is_given_up_before_another_opens() -> None:
    them = Participant()
    them.run(PREPARE, a_round())
    with pytest.raises(PhaseOrder, match="must be given up before b"), them.guard.running(PREPARE, a_round("b")):
        pass


def test_a_phase_runs_by_the_round_that_prepare_has_opened() -> None:
    """A round never changes; whoever sends another one under its id is not followed."""
    them = Participant(Role.RANK)
    them.run(PREPARE, a_round(install=STAGED))
    with them.guard.running(TRANSFER, a_round(install=IN_PLACE)) as current:
        assert current.message == a_round(install=STAGED)


def test_replies_of_few_rounds_are_kept_and_those_of_the_open_one_always() -> None:
    them = Participant()
    them.run(PREPARE, a_round())
    for number in range(3 * KEPT_ROUNDS):
        them.run(ABORT, a_round(f"unknown-{number}"))
    assert them.run(PREPARE, a_round()) == 1
    assert len(them.guard._answers) == KEPT_ROUNDS


@pytest.mark.timeout(60)  # gc.collect() looks at all that earlier tests of the process have left
def test_an_error_that_is_kept_keeps_no_memory_of_its_phase() -> None:
    class Buffer:
        pass

    kept: list[weakref.ref[Buffer]] = []

    def fail_with_a_buffer() -> None:
        buffer = Buffer()
        kept.append(weakref.ref(buffer))
        raise PeerLost("gone")

    them = Participant()
    with pytest.raises(PeerLost):
        them.run(PREPARE, a_round(), fail_with_a_buffer)
    gc.collect()
    assert kept[0]() is None
    with pytest.raises(PeerLost):
        them.run(PREPARE, a_round())


class AnyOrder(RuleBasedStateMachine):
    """Phases of a few rounds in any order, some of which fail."""

    def __init__(self) -> None:
        super().__init__()
        self.them = Participant()
        self.heard: dict[tuple[str, Phase], str] = {}

    @rule(
        phase=st.sampled_from(sorted(RULES)), name=st.sampled_from("abc"), fails=st.booleans(), epoch=st.integers(1, 2)
    )
    def ask(self, phase: Phase, name: str, fails: bool, epoch: int) -> None:
        """One call. What has run answers alike for as long as it is kept: three rounds are."""
        round_ = a_round(name, epoch=epoch)
        try:
            heard = f"done {self.them.run(phase, round_, lost if fails else lambda: None)}"
        except PeerLost as error:
            heard = f"failed {error}"
        except (PhaseOrder, Aborted):
            assert (name, phase) not in self.heard  # what was refused has not run
            return
        assert self.heard.setdefault((name, phase), heard) == heard

    @invariant()
    def nothing_runs_twice_or_out_of_order(self) -> None:
        """What was worked on, round by round, is a beginning of the table, and no round comes back."""
        assert len(set(self.them.worked)) == len(self.them.worked)
        names = list(dict.fromkeys(name for name, _ in self.them.worked))
        for name in names:
            own = [phase for each, phase in self.them.worked if each == name]
            assert own == list(PHASES[: len(own)])
        assert [name for name, _ in self.them.worked] == sorted((name for name, _ in self.them.worked), key=names.index)


TestAnyOrder = AnyOrder.TestCase


@given(st.lists(st.tuples(st.sampled_from(sorted(RULES)), st.sampled_from("ab")), max_size=30))
def test_a_rank_has_no_verify_before_its_transfer(calls: list[tuple[Phase, str]]) -> None:
    """COMMIT is what must not come too early: nothing installs what was not verified."""
    them = Participant(Role.RANK)
    for phase, name in calls:
        try:
            them.run(phase, a_round(name))
        except (PhaseOrder, Aborted):
            continue
    for name in "ab":
        own = [phase for each, phase in them.worked if each == name]
        if COMMIT in own:
            assert own.index(TRANSFER) < own.index(VERIFY) < own.index(COMMIT)
