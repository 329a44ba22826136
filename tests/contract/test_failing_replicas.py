"""A replica that lives and fails its part of weight syncs is left out, told, and tried again; the others go on."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.fleet.view import FleetView
from coordinator.sync import excluded_replicas as left_out
from coordinator.sync.participants import RollCall
from coordinator.sync.weight_sync import MAX_ROUNDS, WeightSync
from servicekit.errors import (
    ERRORS,
    Aborted,
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    Fenced,
    Internal,
    InvalidRequest,
    PeerLost,
    SlotTaken,
    TandemError,
    TooLarge,
    Unavailable,
)
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.contract.test_coordinator_weights import GrowingFleet, sync_of
from tests.fakes.fake_fleet import FakeFleet, StaticFleet, fake_fleet
from tests.fakes.fake_sync import FakeGroup, Fault
from tests.kit.waiting import until
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY

ALWAYS = 1000
PHASES = [PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT]
# A coordinator that was replaced ends.
OF_A_REPLICA = [error for error in ERRORS if error is not Fenced]


def break_(fleet: FakeFleet, index: int, phase: int, error: TandemError, times: int = ALWAYS) -> None:
    fleet.rollout_services[index].sync.faults.extend([Fault(phase, error)] * times)  # type: ignore[arg-type]


async def publish_next(fleet: FakeFleet, sync: WeightSync) -> Any:
    fleet.trainer_service.policy_version += 1
    return await sync.publish(fleet.trainer_service.policy_version)


def serving(sync: WeightSync) -> list[str]:
    return [replica.name for replica in sync._fleet.serving()]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("bad", [0, 1])
async def test_whatever_a_replica_at_work_fails_with_the_others_go_on(phase: int, bad: int) -> None:
    async with fake_fleet() as fleet:
        for kind in OF_A_REPLICA:
            told: list[str] = []
            sync = sync_of(fleet, FakeGroup(), fleet.trainer_service.policy_version, warn=told.append)
            service = fleet.rollout_services[bad]
            service.sync.faults.clear()
            await publish_next(fleet, sync)
            assert len(serving(sync)) == 2, kind
            break_(fleet, bad, phase, kind("its device is broken"))
            await publish_next(fleet, sync)
            assert serving(sync) == [f"rollout-{1 - bad}"], kind
            assert fleet.rollout_services[1 - bad].policy_version == fleet.trainer_service.policy_version
            (trouble,) = sync.left_out.troubles()
            assert f"rollout-{bad} is left out of weight syncs" in trouble
            assert "its device is broken" in trouble
            assert [text for text in told if f"rollout-{bad} is left out" in text][0:1], kind


@pytest.mark.parametrize("phase", PHASES)
async def test_whatever_a_joiner_fails_with_those_that_serve_are_not_touched(phase: int) -> None:
    async with fake_fleet() as fleet:
        first, second = fleet.replicas
        for kind in OF_A_REPLICA:
            members = GrowingFleet([first])
            sync = sync_of(fleet, FakeGroup(), fleet.trainer_service.policy_version, members=members)
            fleet.rollout_services[1].sync.faults.clear()
            await publish_next(fleet, sync)
            members.replicas.append(second)
            fleet.rollout_services[1].state = pb.REPLICA_STATE_UNSEEDED
            break_(fleet, 1, phase, kind("its device is broken"))
            fleet.rollout_services[0].sync.seen.clear()
            assert await sync.seed_late_joiners(fleet.trainer_service.policy_version) is None
            assert fleet.rollout_services[0].sync.seen == [], kind
            assert (await publish_next(fleet, sync)).policy_version == fleet.trainer_service.policy_version
            assert len({round_id for round_id, _ in fleet.rollout_services[0].sync.seen}) == 1, kind
            assert serving(sync) == ["rollout-0"], kind


async def test_a_joiner_that_comes_while_the_trainer_works_gets_its_weights_after_those_that_serve() -> None:
    async with fake_fleet() as fleet:
        first, second = fleet.replicas
        members = GrowingFleet([first])
        sync = sync_of(fleet, FakeGroup(), members=members)
        await sync.publish(0)
        members.replicas.append(second)
        await publish_next(fleet, sync)
        rounds = [dict.fromkeys(round_id for round_id, _ in each.sync.seen) for each in fleet.rollout_services]
        assert not rounds[0].keys() & rounds[1].keys()
        assert serving(sync) == ["rollout-0", "rollout-1"]


async def test_a_replica_that_goes_on_failing_costs_fewer_and_fewer_rounds() -> None:
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, FakeGroup())
        await sync.publish(0)
        break_(fleet, 1, TRANSFER, Internal("MemoryError"))
        for _ in range(5):
            await publish_next(fleet, sync)
            await sync.seed_late_joiners(fleet.trainer_service.policy_version)
        failed = {round_id for round_id, _ in fleet.rollout_services[1].sync.seen}
        assert len(failed) == 3  # the good one, the common one, and one of its own
        assert serving(sync) == ["rollout-0"]


async def test_a_replica_that_works_again_is_seeded_by_a_round_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_out, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(left_out, "COST_FACTOR", 0.0)
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, FakeGroup())
        await sync.publish(0)
        break_(fleet, 1, TRANSFER, Internal("MemoryError"), times=2)
        await publish_next(fleet, sync)
        if serving(sync) == ["rollout-0"]:
            fleet.rollout_services[0].sync.seen.clear()
            assert await sync.seed_late_joiners(fleet.trainer_service.policy_version) is not None
            assert fleet.rollout_services[0].sync.seen == []
        assert serving(sync) == ["rollout-0", "rollout-1"]
        assert sync.left_out.troubles() == []


async def test_one_accident_is_made_up_for_in_the_same_publication() -> None:
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, FakeGroup())
        await sync.publish(0)
        break_(fleet, 1, VERIFY, DigestMismatch("digest differs"), times=1)
        await publish_next(fleet, sync)
        assert (serving(sync), sync.left_out.troubles()) == (["rollout-0", "rollout-1"], [])


@pytest.mark.parametrize("error", [Internal("MemoryError"), ConfigError("torch must match"), InvalidRequest("odd")])
@pytest.mark.parametrize("bad", [(0,), (2,), (5,), (1, 4)])
async def test_those_that_fail_among_many_are_found(bad: tuple[int, ...], error: TandemError) -> None:
    async with fake_fleet(num_replicas=6) as fleet:
        sync = sync_of(fleet, FakeGroup())
        for index in bad:
            break_(fleet, index, PREPARE, error)
        await sync.publish(0)
        assert serving(sync) == [f"rollout-{index}" for index in range(6) if index not in bad]


def fail_together(fleet: FakeFleet, bad: set[str], error: Callable[[str], TandemError]) -> None:
    """Trainer and replicas refuse rounds with a replica of `bad`, and name its rank."""
    for part in (fleet.trainer_service.sync, *(service.sync for service in fleet.rollout_services)):
        run = part.run_phase

        def run_phase(phase: Any, round_: pb.Round, run: Any = run) -> Any:
            found = sorted(bad & {spec.name for spec in round_.replicas})
            if phase == PREPARE and found:
                raise error(found[0])
            return run(phase, round_)

        part.run_phase = run_phase  # type: ignore[assignment]


@pytest.mark.parametrize(
    "error",
    [
        lambda name: ConfigError(f"torch must match: {name}/0 has 2.99, trainer/0 has 2.13"),
        lambda name: DeadlineExceeded(f"group v1 was not formed in 60 s; missing: {name}/0"),
        lambda name: PeerLost(f"lost {name}/0: no route"),
        lambda name: Aborted("the epoch is over"),
    ],
)
@pytest.mark.parametrize("bad", [{"rollout-0"}, {"rollout-3"}, {"rollout-1", "rollout-4"}])
async def test_one_over_which_all_fail_alike_is_found(bad: set[str], error: Callable[[str], TandemError]) -> None:
    async with fake_fleet(num_replicas=5) as fleet:
        sync = sync_of(fleet, FakeGroup())
        fail_together(fleet, bad, error)
        await sync.publish(0)
        assert serving(sync) == [replica.name for replica in fleet.replicas if replica.name not in bad]
        assert set(sync.left_out.reasons()) == bad


async def test_a_healthy_replica_that_lost_the_one_that_failed_is_not_blamed_for_it() -> None:
    async with fake_fleet(num_replicas=3) as fleet:
        sync = sync_of(fleet, FakeGroup())
        await sync.publish(0)
        break_(fleet, 1, TRANSFER, Internal("MemoryError"))
        break_(fleet, 2, TRANSFER, PeerLost("rollout-2/0: lost rollout-1/0"), times=1)
        await publish_next(fleet, sync)
        assert serving(sync) == ["rollout-0", "rollout-2"]
        assert set(sync.left_out.reasons()) == {"rollout-1"}


@pytest.mark.parametrize("min_replicas", [1, 2])
async def test_when_all_replicas_fail_alike_the_run_ends_and_says_so(min_replicas: int) -> None:
    async with fake_fleet() as fleet:
        for index in (0, 1):
            break_(fleet, index, TRANSFER, Internal("MemoryError: out of memory"))
        with pytest.raises(TandemError, match=r"weight sync of version 0, try 3: rollout-[01]: MemoryError"):
            await sync_of(fleet, FakeGroup(), min_replicas=min_replicas).publish(0)


@pytest.mark.parametrize("error", [Internal("MemoryError"), Unavailable("no route"), TooLarge("memory")])
async def test_a_replica_that_is_needed_is_tried_again_and_named(error: TandemError) -> None:
    async with fake_fleet() as fleet:
        break_(fleet, 1, TRANSFER, error)
        sync = sync_of(fleet, FakeGroup(), min_replicas=2)
        with pytest.raises(TandemError, match=f"rollout-1: {error}"):
            await sync.publish(0)
        assert len({round_id for round_id, _ in fleet.rollout_services[1].sync.seen}) == MAX_ROUNDS + 1
        fleet.rollout_services[1].sync.faults.clear()
        await sync.publish(0)
        assert serving(sync) == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("error", [Internal("out of memory"), InvalidRequest("odd"), Fenced("another one leads")])
async def test_what_the_trainer_fails_with_is_not_blamed_on_replicas(error: TandemError) -> None:
    async with fake_fleet() as fleet:
        fleet.trainer_service.sync.faults.extend([Fault(TRANSFER, error)] * ALWAYS)
        with pytest.raises(type(error), match=f"trainer: {error}"):
            await sync_of(fleet, FakeGroup()).publish(0)


async def test_a_run_that_is_to_end_does_not_wait_for_the_next_try() -> None:
    ending = asyncio.Event()
    async with fake_fleet(num_replicas=1) as fleet:
        break_(fleet, 0, TRANSFER, Internal("MemoryError"))
        sync = sync_of(fleet, FakeGroup(), ending=ending, pause_s=600.0)
        publishing = asyncio.create_task(sync.publish(0))
        await asyncio.to_thread(until, lambda: fleet.rollout_services[0].sync.phases()[-1:] == [ABORT])
        ending.set()
        with pytest.raises(TandemError, match="try 1: rollout-0: MemoryError"):
            await asyncio.wait_for(publishing, 10.0)


async def test_a_slot_that_another_process_holds_does_not_hold_up_the_others() -> None:
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, FakeGroup())
        await sync.publish(0)
        break_(fleet, 1, PREPARE, SlotTaken("rollout-1/0: another worker holds this slot"))
        await asyncio.wait_for(publish_next(fleet, sync), 10.0)
        assert serving(sync) == ["rollout-0"]


@pytest.mark.parametrize("takes_over", [True, False])
async def test_a_call_outside_of_rounds_that_hangs_is_given_up(
    takes_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.sync.weight_sync.TAKE_OVER_S", 0.2)

    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    async with fake_fleet() as fleet:
        members = GrowingFleet([fleet.replicas[0]])
        disk: dict[str, Any] = {"transport": "disk", "disk_folder": "/weights", "transfer_timeout_s": 1.0}
        sync = sync_of(fleet, FakeGroup(), members=members, **disk)
        await sync.publish(0)
        members.replicas.append(fleet.replicas[1])
        monkeypatch.setattr(fleet.replicas[1], "take_over" if takes_over else "load_published", hang)
        if takes_over:
            await asyncio.wait_for(sync.take_over(), 10.0)
        else:
            await asyncio.wait_for(sync.seed_late_joiners(0), 10.0)
            assert serving(sync) == ["rollout-0", "rollout-1"]  # by a round, after transfer_timeout_s


class Clock(FakeGroup):
    """Counts waits for slots: looks that may take longer than none."""

    waits = 0

    def settle(self, slots: Any, timeout_s: float) -> Any:
        self.waits += timeout_s > 0 and bool(set(slots) & set(self.empty))
        return super().settle(slots, timeout_s)


async def test_a_replica_without_its_slot_is_waited_for_once_and_is_back_with_it() -> None:
    group = Clock()
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, group)
        await sync.publish(0)
        group.empty = ("rollout-1/0",)
        await publish_next(fleet, sync)
        waited, group.waits = group.waits, 0
        assert waited > 0
        for _ in range(3):
            await sync.seed_late_joiners(fleet.trainer_service.policy_version)
            await publish_next(fleet, sync)
        assert group.waits == 0
        assert "rollout-1 is left out of weight syncs" in sync.left_out.troubles()[0]
        group.empty = ()
        await sync.seed_late_joiners(fleet.trainer_service.policy_version)
        assert (serving(sync), sync.left_out.troubles()) == (["rollout-0", "rollout-1"], [])


async def test_a_rank_whose_lease_runs_out_in_a_round_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its service lives and answers; the call would last until the round's own deadline."""
    group = FakeGroup()
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, group, formation_timeout_s=600.0)
        await sync.publish(0)
        rounds, thaw = fleet.replicas[1].rounds, asyncio.Event()
        run_phases = rounds.run_phases

        async def freeze(*args: Any) -> Any:
            group.empty = ("rollout-1/0",)
            await thaw.wait()
            return await run_phases(*args)

        monkeypatch.setattr(rounds, "run_phases", freeze)
        await asyncio.wait_for(publish_next(fleet, sync), 20.0)
        assert serving(sync) == ["rollout-0"]
        assert "it is frozen" in sync.left_out.troubles()[0]
        thaw.set()
        group.empty = ()
        monkeypatch.setattr(rounds, "run_phases", run_phases)
        await sync.seed_late_joiners(fleet.trainer_service.policy_version)
        assert serving(sync) == ["rollout-0", "rollout-1"]


async def test_a_service_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its host cannot be reached by the coordinator alone: it announces itself all the while."""
    async with fake_fleet() as fleet:
        call = roll_call_of(fleet)
        status, asked = fleet.replicas[1].status, 0
        lost = asyncio.Event()

        async def silent(*, timeout_s: float = 1.0) -> Any:
            nonlocal asked
            asked += 1
            if not lost.is_set():
                await asyncio.sleep(timeout_s)
                raise DeadlineExceeded("rollout-1: Deadline Exceeded")
            return await status(timeout_s=timeout_s)

        monkeypatch.setattr(fleet.replicas[1], "status", silent)
        begun_s = asyncio.get_running_loop().time()
        for _ in range(5):
            assert [replica.name for replica in (await call.call(0)).replicas] == ["rollout-0"]
        assert asyncio.get_running_loop().time() - begun_s < 2 * 0.5
        lost.set()
        async with asyncio.timeout(10.0):
            while len((await call.call(0)).replicas) == 1:
                pass


def roll_call_of(fleet: FakeFleet) -> RollCall:
    return RollCall(
        trainer=fleet.trainer,
        fleet=StaticFleet(fleet.replicas),
        group=FakeGroup(known={"rollout-1/0": None}),
        min_replicas=1,
        probe_timeout_s=0.5,
        slots_timeout_s=0.1,
        timeout_s=5.0,
        ending=asyncio.Event(),
    )


async def test_status_tells_who_is_left_out() -> None:
    async with fake_fleet() as fleet:
        sync, view = sync_of(fleet, FakeGroup()), FleetView()
        view.left_out = sync.left_out
        assert view.troubles() == []
        break_(fleet, 1, TRANSFER, Internal("MemoryError"))
        await sync.publish(0)
        (trouble,) = view.troubles()
        assert trouble.startswith("rollout-1 is left out of weight syncs since ")
        assert trouble.endswith("its part failed 2 times, last with: rollout-1: MemoryError")
