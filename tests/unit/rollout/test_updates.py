import asyncio
import contextlib
import time
from typing import Any

import pytest

from rollout_service.engine import GroupRequest, SamplingSettings
from rollout_service.weight_updates.admission import Admission
from rollout_service.weight_updates.pauses import Pauses
from rollout_service.weight_updates.updates import WeightUpdates
from servicekit.errors import DigestMismatch, NotReady, PeerLost, PhaseOrder, Poisoned, StaleVersion, TandemError
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.unit.rollout.fake_engine import FakeEngine, FakeRanks, generate_groups
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY, Phase

UNSEEDED, SERVING = pb.REPLICA_STATE_UNSEEDED, pb.REPLICA_STATE_SERVING
PAUSED, POISONED = pb.REPLICA_STATE_PAUSED, pb.REPLICA_STATE_POISONED
IN_PLACE, STAGED = pb.INSTALL_MODE_IN_PLACE, pb.INSTALL_MODE_STAGED
DRAIN, KEEP_KV, RECOMPUTE = pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_KEEP_KV, pb.PAUSE_MODE_RECOMPUTE
DRAIN_S = 0.05


class Rig:
    """A replica's parts around a fake engine."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.ranks = FakeRanks()
        self.admission = Admission()
        self.pauses = Pauses(self.engine, self.admission, drain_s=DRAIN_S)
        self.states: list[int] = []
        self.reports: list[list[pb.PhaseReport]] = []
        self.outcomes: list[str] = []
        self.refused_s: list[float] = []
        self.updates = WeightUpdates(
            self.engine,
            self.ranks,
            self.pauses,
            lambda state, version: self.states.append(state),
            self.reports.append,
            lambda outcome, epoch: self.outcomes.append(outcome),
            self.refused_s.append,
            name="rollout-0",
        )

    async def run(self, *phases: pb.RoundPhase.ValueType, round_: pb.Round) -> int:
        state = 0
        for phase in phases:
            state = (await self.updates.run_phase(phase, round_))[0].state
        return state

    async def seed(self, version: int = 1) -> None:
        await self.run(PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT, round_=a_round("seed", version))
        self.engine.calls.clear()
        self.ranks.phases.clear()

    def call(self) -> "asyncio.Task[int]":
        """A generate call under way; returns its number of tokens."""

        async def generate() -> int:
            sampling = SamplingSettings(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4, stop_token_ids=())
            groups = [GroupRequest(group_id="g", prompt_ids=[1], num_completions=1)]
            self.admission.enter(1)
            try:
                items = self.admission.until_evicted(generate_groups(self.engine, groups, sampling))
                return sum([len(c.token_ids) async for part in items for g in part for c in g.completions])
            finally:
                self.admission.leave(1)

        return asyncio.create_task(generate())


def a_round(round_id: str = "r", version: int = 2, **fields: Any) -> pb.Round:
    defaults: dict[str, Any] = {"install_mode": IN_PLACE, "pause_mode": DRAIN}
    defaults |= {"formation_timeout_s": 0.001, "transfer_timeout_s": 1.0}
    return pb.Round(round_id=round_id, policy_version=version, **defaults | fields)


async def test_a_round_seeds_an_unseeded_replica() -> None:
    rig = Rig()
    assert rig.updates.state == UNSEEDED
    with pytest.raises(NotReady):
        rig.updates.check_can_generate()
    assert await rig.run(PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT, round_=a_round(version=0)) == SERVING
    assert rig.ranks.phases == ["PREPARE", "TRANSFER", "VERIFY", "COMMIT"]
    assert rig.engine.calls == ["freeze", "begin_update", "end_update", "set_version 0", "flush_cache", "thaw"]
    rig.updates.check_can_generate()


async def test_the_replica_is_paused_from_pause_to_commit() -> None:
    rig = Rig()
    await rig.seed()
    round_ = a_round()
    assert await rig.run(PREPARE, round_=round_) == SERVING
    assert await rig.run(PAUSE, TRANSFER, VERIFY, round_=round_) == PAUSED
    assert rig.updates.policy_version == 1
    assert await rig.run(COMMIT, round_=round_) == SERVING
    assert rig.updates.policy_version == 2


async def test_sglang_opens_its_session_between_pause_and_transfer() -> None:
    rig, asked, answer = Rig(), asyncio.Event(), asyncio.Event()
    await rig.seed()
    rig.engine.calls.clear()

    async def slow() -> None:
        rig.engine.calls.append("begin_update")
        asked.set()
        await answer.wait()

    rig.engine.begin_update = slow  # type: ignore[method-assign]
    assert await asyncio.wait_for(rig.run(PREPARE, PAUSE, round_=a_round()), 10.0) == PAUSED
    transfer = asyncio.create_task(rig.run(TRANSFER, round_=a_round()))
    await asyncio.wait_for(asked.wait(), 10.0)
    await asyncio.sleep(0.05)
    assert rig.ranks.phases[-1] != "TRANSFER"  # no byte before the session is open
    answer.set()
    await transfer
    assert (rig.ranks.phases[-1], rig.engine.calls) == ("TRANSFER", ["freeze", "begin_update"])


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_round_that_is_given_up_after_its_pause_leaves_no_session_open_and_the_old_version(
    refuses: bool,
) -> None:
    rig = Rig()
    await rig.seed()
    rig.engine.calls.clear()

    async def refuse() -> None:
        raise RuntimeError("a session is open already")

    if refuses:
        rig.engine.begin_update = refuse  # type: ignore[method-assign]
    assert await rig.run(PREPARE, PAUSE, ABORT, round_=a_round()) == SERVING
    closed = [] if refuses else ["begin_update", "end_update"]
    assert rig.engine.calls == ["freeze", *closed, "thaw"]
    assert rig.updates.policy_version == 1


async def test_the_pause_that_calls_feel_is_measured_from_gate_closed_to_gate_open() -> None:
    rig = Rig()
    await rig.seed()
    assert rig.refused_s == []  # before the first weights there are no calls
    rig.engine.hold()
    call = rig.call()
    await asyncio.sleep(0)
    begun_s = time.monotonic()
    await rig.run(PREPARE, PAUSE, TRANSFER, VERIFY, round_=a_round())
    assert rig.refused_s == []
    await rig.run(COMMIT, round_=a_round())
    # The call does not end by itself: the drain, in which others are refused already, takes all of its time.
    assert 0.9 * DRAIN_S <= rig.refused_s[0] <= time.monotonic() - begun_s
    await asyncio.gather(call, return_exceptions=True)


async def test_every_way_to_accept_calls_again_ends_a_measured_pause() -> None:
    rig = Rig()
    await rig.seed()
    await rig.run(PREPARE, PAUSE, ABORT, round_=a_round("given up", 2))
    assert len(rig.refused_s) == 1
    await rig.updates.pause(KEEP_KV)
    await rig.updates.resume()
    await rig.updates.resume()  # open already
    assert len(rig.refused_s) == 2
    await rig.run(PREPARE, PAUSE, TRANSFER, ABORT, round_=a_round("poisons", 3))
    assert len(rig.refused_s) == 2
    await rig.run(PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT, round_=a_round("heals", 4))
    assert len(rig.refused_s) == 3


async def test_staged_bytes_travel_while_generation_goes_on() -> None:
    rig = Rig()
    await rig.seed()
    assert await rig.run(PREPARE, TRANSFER, VERIFY, round_=a_round(install_mode=STAGED)) == SERVING
    assert rig.engine.calls == []
    assert await rig.run(COMMIT, round_=a_round(install_mode=STAGED)) == SERVING
    assert rig.engine.calls == ["freeze", "begin_update", "end_update", "set_version 2", "flush_cache", "thaw"]


@pytest.mark.parametrize(
    ("install", "done", "phase"),
    [
        (IN_PLACE, (), PAUSE),
        (IN_PLACE, (), TRANSFER),
        (IN_PLACE, (PREPARE,), TRANSFER),
        (IN_PLACE, (PREPARE, PAUSE), VERIFY),
        (IN_PLACE, (PREPARE, PAUSE), COMMIT),
        (IN_PLACE, (PREPARE, PAUSE, TRANSFER), COMMIT),
        (STAGED, (PREPARE,), VERIFY),
        (STAGED, (PREPARE, TRANSFER), COMMIT),
        (STAGED, (PREPARE,), pb.ROUND_PHASE_UNSPECIFIED),
    ],
)
async def test_a_phase_out_of_order_changes_nothing(
    install: pb.InstallMode.ValueType, done: tuple[pb.RoundPhase.ValueType, ...], phase: pb.RoundPhase.ValueType
) -> None:
    rig = Rig()
    await rig.seed()
    round_ = a_round(install_mode=install)
    await rig.run(*done, round_=round_)
    before = (rig.updates.state, list(rig.ranks.phases), list(rig.engine.calls))
    with pytest.raises(PhaseOrder):
        await rig.run(phase, round_=round_)
    assert (rig.updates.state, rig.ranks.phases, rig.engine.calls) == before
    remaining = [each for each in (PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT) if each not in done]
    assert await rig.run(*remaining, round_=round_) == SERVING


@pytest.mark.parametrize(
    ("done", "state"),
    [
        ((), SERVING),
        ((PREPARE,), SERVING),
        ((PREPARE, PAUSE), SERVING),
        ((PREPARE, PAUSE, TRANSFER), POISONED),
        ((PREPARE, PAUSE, TRANSFER, VERIFY), POISONED),
        ((PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT), SERVING),
    ],
)
async def test_what_an_abort_leaves(done: tuple[pb.RoundPhase.ValueType, ...], state: int) -> None:
    rig = Rig()
    await rig.seed()
    await rig.run(*done, round_=a_round())
    assert await rig.run(ABORT, round_=a_round()) == state
    assert rig.engine.calls.count("begin_update") == rig.engine.calls.count("end_update")


async def test_a_staged_round_aborted_before_commit_leaves_the_old_version() -> None:
    rig = Rig()
    await rig.seed()
    staged = a_round(install_mode=STAGED)
    assert await rig.run(PREPARE, TRANSFER, VERIFY, PAUSE, ABORT, round_=staged) == SERVING
    assert rig.updates.policy_version == 1


async def test_a_poisoned_replica_serves_again_after_a_round() -> None:
    rig = Rig()
    await rig.seed()
    await rig.run(PREPARE, PAUSE, TRANSFER, ABORT, round_=a_round("bad"))
    with pytest.raises(Poisoned):
        rig.updates.check_can_generate()
    with pytest.raises(Poisoned):
        await rig.updates.resume()
    assert await rig.run(PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT, round_=a_round("good")) == SERVING


async def test_a_phase_that_failed_fails_its_round() -> None:
    rig = Rig()
    await rig.seed()
    rig.ranks.fail_at = {TRANSFER: PeerLost("rank 1: trainer/0 went away")}
    await rig.run(PREPARE, PAUSE, round_=a_round())
    for _ in range(2):  # asked again, it gives the same answer
        with pytest.raises(PeerLost):
            await rig.run(TRANSFER, round_=a_round())
    assert rig.ranks.phases.count("TRANSFER") == 1
    with pytest.raises(PhaseOrder, match="trainer/0 went away"):
        await rig.run(VERIFY, round_=a_round())
    assert await rig.run(ABORT, round_=a_round()) == POISONED


async def test_a_phase_asked_for_twice_runs_once() -> None:
    rig = Rig()
    await rig.seed()
    rig.ranks.gate.clear()
    first = asyncio.create_task(rig.updates.run_phase(PREPARE, a_round()))
    second = asyncio.create_task(rig.updates.run_phase(PREPARE, a_round()))
    await asyncio.sleep(0)
    first.cancel()  # a caller that gives up does not stop the phase
    await asyncio.sleep(0)
    rig.ranks.gate.set()
    reports = await second
    assert await rig.updates.run_phase(PREPARE, a_round()) == reports
    assert rig.ranks.phases == ["PREPARE"]
    assert len(rig.reports) == 5 + 1  # the seeding round's five phases, and this one


async def test_an_older_version_is_refused_and_an_equal_one_is_not() -> None:
    rig = Rig()
    await rig.seed(version=5)
    with pytest.raises(StaleVersion, match="version 4"):
        await rig.run(PREPARE, round_=a_round("old", 4))
    await rig.run(PREPARE, round_=a_round("same", 5))


async def test_a_new_round_takes_the_place_of_one_that_its_coordinator_left() -> None:
    rig = Rig()
    await rig.seed()
    await rig.run(PREPARE, PAUSE, round_=a_round("left"))
    assert await rig.run(PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT, round_=a_round("new", 3)) == SERVING
    assert rig.ranks.phases[:3] == ["PREPARE", "ABORT", "PREPARE"]
    with pytest.raises(PhaseOrder):
        await rig.run(TRANSFER, round_=a_round("left"))


class HangingRanks(FakeRanks):
    """Wait for a peer in the round `left`, which was cut off from us, until an ABORT ends that."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.aborted = asyncio.Event(), asyncio.Event()

    async def run_phase(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        if round_.round_id == "left":
            self.waits.set()
            if phase == ABORT:
                self.aborted.set()
            else:
                await asyncio.wait_for(self.aborted.wait(), 20.0)
                raise PeerLost("trainer/0 went away")
        return await super().run_phase(phase, round_)


@pytest.mark.parametrize(
    ("older", "epoch", "ends"),
    [(a_round("new", 3), 0, True), (a_round("older", 1), 0, False), (a_round("new", 3), 1, False)],
)
async def test_a_new_round_ends_the_wait_of_one_whose_abort_never_came(older: pb.Round, epoch: int, ends: bool) -> None:
    rig = Rig()
    await rig.seed()
    rig.updates._steps._ranks = ranks = HangingRanks()
    left = asyncio.create_task(rig.run(PREPARE, round_=a_round("left", 2, epoch=epoch)))
    await asyncio.wait_for(ranks.waits.wait(), 10.0)
    following = asyncio.create_task(rig.run(PREPARE, round_=older))
    if ends:
        assert await asyncio.wait_for(following, 10.0) == SERVING
    else:
        assert not (await asyncio.wait({following}, timeout=0.1))[0]
        assert not ranks.aborted.is_set()
        await rig.run(ABORT, round_=a_round("left"))
        with pytest.raises(TandemError) if epoch else contextlib.nullcontext():
            await following
    with pytest.raises(PeerLost):
        await left


async def test_a_prepare_that_comes_after_its_abort_does_not_open_the_round() -> None:
    rig = Rig()
    await rig.seed()
    await rig.run(ABORT, round_=a_round("late"))
    with pytest.raises(PhaseOrder, match="over"):
        await rig.run(PREPARE, round_=a_round("late"))


async def test_frozen_calls_fail_when_the_weights_are_poisoned() -> None:
    rig = Rig()
    await rig.seed()
    rig.engine.hold()
    call = rig.call()
    await asyncio.sleep(0)
    await rig.run(PREPARE, PAUSE, TRANSFER, round_=a_round(pause_mode=KEEP_KV))
    assert rig.engine.calls == ["freeze", "begin_update"]
    await rig.run(ABORT, round_=a_round(pause_mode=KEEP_KV))
    with pytest.raises(Poisoned):
        await call
    assert "thaw" not in rig.engine.calls


@pytest.mark.parametrize("install", [IN_PLACE, STAGED])
async def test_recompute_drops_the_cache_of_what_runs_before_the_flip_and_ends_nothing(
    install: pb.InstallMode.ValueType,
) -> None:
    rig = Rig()
    await rig.seed()
    rig.engine.hold()
    call = rig.call()
    await asyncio.sleep(0)
    round_ = a_round(pause_mode=RECOMPUTE, install_mode=install)
    phases = (PREPARE, TRANSFER, VERIFY, COMMIT) if install == STAGED else (PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT)
    assert await rig.run(*phases, round_=round_) == SERVING
    first, *_, last = rig.engine.calls
    assert (first, rig.engine.calls[1], last) == ("freeze", "retract", "thaw")
    assert {"set_version 2", "flush_cache"} < set(rig.engine.calls)
    rig.engine.release()
    assert await call == 4
    assert "abort_running" not in rig.engine.calls


async def test_a_round_that_recomputes_drops_the_cache_of_requests_that_were_frozen_before() -> None:
    rig = Rig()
    await rig.seed()
    await rig.updates.pause(KEEP_KV)
    assert rig.engine.calls == ["freeze"]
    await rig.updates.pause(RECOMPUTE)
    assert rig.engine.calls == ["freeze", "retract"]


async def test_draining_waits_for_what_runs() -> None:
    rig = Rig()
    await rig.seed()
    rig.engine.hold()
    call = rig.call()
    await asyncio.sleep(0)
    pause = asyncio.create_task(rig.updates.pause(DRAIN))
    await asyncio.sleep(0.01)
    rig.engine.release()
    await pause
    assert await call == 4
    assert "abort_running" not in rig.engine.calls


@pytest.mark.parametrize("mode", [DRAIN, pb.PAUSE_MODE_ABORT_REQUEUE])
async def test_what_does_not_drain_is_aborted(mode: pb.PauseMode.ValueType) -> None:
    rig = Rig()
    await rig.seed()
    rig.engine.hold()
    call = rig.call()
    await asyncio.sleep(0)
    await rig.updates.pause(mode)
    assert await call == 0
    assert rig.updates.state == PAUSED


async def test_an_unknown_pause_mode_is_refused() -> None:
    rig = Rig()
    with pytest.raises(TandemError, match="pause mode 0"):
        await rig.updates.pause(pb.PAUSE_MODE_UNSPECIFIED)
    assert rig.updates.state == UNSEEDED


async def test_resume_is_refused_while_a_round_holds_the_pause() -> None:
    rig = Rig()
    await rig.seed()
    await rig.run(PREPARE, PAUSE, round_=a_round())
    with pytest.raises(PhaseOrder):
        await rig.updates.resume()


async def test_states_are_told_as_they_change() -> None:
    rig = Rig()
    await rig.seed()
    assert rig.states == [UNSEEDED] * 4 + [SERVING]


async def test_outcomes_are_told_as_rounds_end() -> None:
    rig = Rig()
    await rig.seed()
    await rig.run(PREPARE, PAUSE, ABORT, round_=a_round("untouched"))
    await rig.run(PREPARE, PAUSE, TRANSFER, ABORT, round_=a_round("touched"))
    rig.ranks.fail_at = {VERIFY: DigestMismatch("rank 0: a message differs")}
    with pytest.raises(DigestMismatch):
        await rig.run(PREPARE, PAUSE, TRANSFER, VERIFY, round_=a_round("wrong"))
    await rig.run(ABORT, round_=a_round("wrong"))
    assert rig.outcomes == ["committed", "aborted", "poisoned", "mismatch", "poisoned"]


def on_disk(version: int = 3) -> pb.LoadPublishedRequest:
    return pb.LoadPublishedRequest(folder="/weights", policy_version=version, round_id="r")


@pytest.mark.parametrize("poisoned", [False, True])
async def test_a_replica_without_weights_serves_what_it_has_loaded_from_disk(poisoned: bool) -> None:
    rig = Rig()
    if poisoned:
        await rig.seed(1)
        await rig.run(PREPARE, PAUSE, TRANSFER, ABORT, round_=a_round(version=2))
        assert rig.updates.state == POISONED
    rig.engine.calls.clear()
    await rig.updates.load_published(on_disk())
    assert (rig.updates.state, rig.updates.policy_version, rig.engine.version) == (SERVING, 3, 3)
    assert rig.engine.calls.index("begin_update") < rig.engine.calls.index("end_update")
    rig.updates.check_can_generate()
    assert await rig.run(PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT, round_=a_round("next", version=4)) == SERVING


async def test_a_load_that_fails_leaves_a_replica_without_weights_which_a_round_can_seed() -> None:
    rig = Rig()
    rig.ranks.fail_load = DigestMismatch("torn")
    with pytest.raises(DigestMismatch):
        await rig.updates.load_published(on_disk())
    assert rig.updates.state == UNSEEDED
    with pytest.raises(NotReady):
        rig.updates.check_can_generate()
    assert rig.engine.calls[-1] == "end_update"
    await rig.seed(3)
    assert rig.updates.state == SERVING


async def test_a_load_whose_caller_gives_up_goes_on_to_its_end() -> None:
    """Half of it would leave SGLang's session open, and refuse every later one."""
    rig, began, go_on = Rig(), asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        began.set()
        await go_on.wait()

    rig.engine.begin_update = slow  # type: ignore[method-assign]
    caller = asyncio.create_task(rig.updates.load_published(on_disk()))
    await began.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    await rig.updates.resume()  # waits for its turn
    assert (rig.updates.state, rig.updates.policy_version) == (SERVING, 3)
    assert "end_update" in rig.engine.calls


async def test_a_replica_that_serves_or_is_in_a_round_does_not_load_from_disk() -> None:
    rig = Rig()
    await rig.run(PREPARE, round_=a_round())
    with pytest.raises(PhaseOrder, match="is under way"):
        await rig.updates.load_published(on_disk())
    await rig.run(ABORT, round_=a_round())
    await rig.seed(1)
    with pytest.raises(PhaseOrder, match="serves version 1 already"):
        await rig.updates.load_published(on_disk())
    await rig.run(PREPARE, PAUSE, TRANSFER, ABORT, round_=a_round("x", version=5))
    with pytest.raises(StaleVersion):
        await rig.updates.load_published(on_disk(version=0))
    assert "LOAD" not in rig.ranks.phases
