"""The weight-sync round as a transaction, over real gRPC: order of phases, checks, abort, retry, names in errors."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from prometheus_client import REGISTRY

from coordinator.sync import excluded_replicas
from coordinator.sync.weight_sync import MAX_ROUNDS, WeightSync
from coordinator.watch.fleet_recorder import FleetRecorder
from servicekit.errors import (
    Aborted,
    DeadlineExceeded,
    DigestMismatch,
    Internal,
    InvalidRequest,
    PeerLost,
    StaleVersion,
    TandemError,
    Unavailable,
    WrongVersion,
)
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_clients.flow import ReplicaOutcome
from tandem_clients.replica import Replica
from tandem_config.schema import SyncSection
from tests.fakes.fake_fleet import FakeFleet, StaticFleet, fake_fleet
from tests.fakes.fake_sync import FakeGroup, Fault
from tests.fakes.sole_lead import SoleLead
from tests.kit.waiting import until
from weightsync.membership.rendezvous import Evicted
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY, Phase

ON_ROLLOUT = [PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT]
ON_TRAINER = [PREPARE, TRANSFER, COMMIT]


def sync_of(fleet: FakeFleet, group: FakeGroup, version: int = 0, **options: Any) -> WeightSync:
    """A WeightSync of a trainer that is at `version`."""
    fleet.trainer_service.policy_version = version
    settings = SyncSection(
        formation_timeout_s=options.pop("formation_timeout_s", 20.0),
        transfer_timeout_s=options.pop("transfer_timeout_s", 20.0),
        probe_timeout_s=10.0,
        lease_ttl_s=0.1,
        install=options.pop("install", "in_place"),
        transport=options.pop("transport", "auto"),
        straggler_timeout_s=options.pop("straggler_timeout_s", None),
    )
    members = options.pop("members", None) or StaticFleet(fleet.replicas)
    lead = options.pop("lead", None) or SoleLead()
    options.setdefault("pause_s", 0.01)
    return WeightSync(trainer=fleet.trainer, fleet=members, group=group, settings=settings, lead=lead, **options)


async def test_a_round_goes_through_its_phases_in_order() -> None:
    group = FakeGroup()
    async with fake_fleet(tensor_parallel=2) as fleet:
        fleet.rollout_services[0].sync.seconds = {"transfer": 2e-6}
        result = await sync_of(fleet, group, 7).publish(7)
    assert fleet.trainer_service.sync.phases() == ON_TRAINER
    for service in fleet.rollout_services:
        assert service.sync.phases() == ON_ROLLOUT
        assert (service.state, service.policy_version) == (pb.REPLICA_STATE_SERVING, 7)
    assert group.asked == [("trainer/0", "trainer/1", "rollout-0/0", "rollout-0/1", "rollout-1/0", "rollout-1/1")]
    assert (result.attempts, result.redundancy, result.bytes_per_rollout_rank) == (1, 1.0, 512)
    assert (result.stages["transfer"], result.stages["verify"]) == pytest.approx((2e-6, 1e-6))  # the slowest one's
    assert sum(result.stages.values()) == pytest.approx(result.total_s)


@pytest.mark.parametrize(
    ("install", "calls"),
    [
        ("in_place", [[PREPARE, PAUSE], [TRANSFER, VERIFY], [COMMIT]]),
        ("staged", [[PREPARE], [TRANSFER, VERIFY], [COMMIT]]),
    ],
)
async def test_what_waits_for_nobody_is_part_of_the_call_before(install: str, calls: list[list[int]]) -> None:
    async with fake_fleet() as fleet:
        await sync_of(fleet, FakeGroup(), 7, install=install).publish(7)
        assert [service.phase_calls for service in fleet.rollout_services] == [calls, calls]


@pytest.mark.parametrize("error", [Unavailable("connection reset"), PeerLost("it hangs"), DeadlineExceeded("late")])
async def test_a_trainer_that_is_lost_when_all_bytes_are_verified_does_not_undo_the_round(error: TandemError) -> None:
    async with fake_fleet() as fleet:
        fleet.trainer_service.sync.faults.append(Fault(TRANSFER, error, lost_reply=True))
        result = await sync_of(fleet, FakeGroup(), 7).publish(7)
    assert (result.attempts, set(result.outcomes.values())) == (1, {ReplicaOutcome.COMMITTED})
    assert all(service.policy_version == 7 for service in fleet.rollout_services)


async def test_a_trainer_that_is_lost_before_a_replica_has_all_bytes_ends_the_round() -> None:
    async with fake_fleet() as fleet:
        fleet.trainer_service.sync.faults.append(Fault(TRANSFER, Unavailable("connection reset")))
        fleet.rollout_services[1].sync.faults.append(Fault(TRANSFER, PeerLost("rollout-1/0: lost trainer/0")))
        observed = FleetRecorder()
        result = await sync_of(fleet, FakeGroup(), 7, observed=observed).publish(7)
    assert result.attempts == 2
    failed, done = observed.rounds
    assert 0 < failed.total_s < done.total_s
    assert fleet.rollout_services[0].sync.phases().count(ABORT) == 1


async def test_a_trainer_that_refuses_to_send_ends_the_round_whatever_replicas_have() -> None:
    async with fake_fleet() as fleet:
        fleet.trainer_service.sync.faults.append(Fault(TRANSFER, InvalidRequest("no such round")))
        with pytest.raises(InvalidRequest, match="no such round"):
            await sync_of(fleet, FakeGroup(), 7).publish(7)


async def test_a_staged_round_leaves_the_pause_to_commit() -> None:
    async with fake_fleet() as fleet:
        result = await sync_of(fleet, FakeGroup(), 7, install="staged").publish(7)
    for service in fleet.rollout_services:
        assert service.sync.phases() == [PREPARE, TRANSFER, VERIFY, COMMIT]
        assert (service.state, service.policy_version) == (pb.REPLICA_STATE_SERVING, 7)
    assert result.stages.keys() == {"roll_call", "prepare", "transfer", "verify", "commit", "other"}


async def test_every_participant_gets_the_same_round() -> None:
    async with fake_fleet() as fleet:
        await sync_of(fleet, FakeGroup()).publish(0)
    seen = [fleet.trainer_service.sync.seen, *(service.sync.seen for service in fleet.rollout_services)]
    assert len({round_id for calls in seen for round_id, _ in calls}) == 1


@pytest.mark.parametrize("phase", [PREPARE, PAUSE, TRANSFER, VERIFY])
@pytest.mark.parametrize("error", [Aborted("gone"), PeerLost("peer lost")])
async def test_a_failed_round_is_aborted_everywhere_and_tried_in_a_new_epoch(
    phase: pb.RoundPhase.ValueType, error: TandemError
) -> None:
    group = FakeGroup()
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.faults.append(Fault(phase, error))
        result = await sync_of(fleet, group, 3).publish(3)
        for sync in (fleet.trainer_service.sync, *(service.sync for service in fleet.rollout_services)):
            first, second = dict.fromkeys(round_id for round_id, _ in sync.seen)
            assert (first, ABORT) in sync.seen
            assert (second, COMMIT) in sync.seen
        assert [service.policy_version for service in fleet.rollout_services] == [3, 3]
    assert (result.attempts, group.epoch) == (2, 2)
    assert 0 < result.stages["retries"] < sum(result.stages.values()) == pytest.approx(result.total_s)


async def test_a_lost_reply_to_commit_is_asked_for_again() -> None:
    async with fake_fleet() as fleet:
        fault = Fault(COMMIT, Unavailable("connection reset"), lost_reply=True)
        fleet.rollout_services[0].sync.faults.append(fault)
        result = await sync_of(fleet, FakeGroup(), 3).publish(3)
        assert result.attempts == 1
        assert ABORT not in fleet.rollout_services[0].sync.phases()
        assert [service.policy_version for service in fleet.rollout_services] == [3, 3]


async def test_the_budget_ends_and_the_error_names_participant_and_states() -> None:
    group = FakeGroup()
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.faults.extend([Fault(TRANSFER, PeerLost("no route"))] * 10)
        with pytest.raises(PeerLost) as caught:
            await sync_of(fleet, group, 3, min_replicas=2).publish(3)
    assert str(caught.value).startswith("weight sync of version 3, try 4: rollout-1: no route; ")
    assert "rollout-0 is poisoned at version 0" in str(caught.value)


@pytest.mark.parametrize(
    "error", [StaleVersion("version 3 is older"), InvalidRequest("it does not fit"), Internal("bug")]
)
async def test_an_error_that_would_come_again_is_not_tried_again(error: TandemError) -> None:
    group = FakeGroup()
    async with fake_fleet() as fleet:
        fleet.trainer_service.sync.faults.append(Fault(PREPARE, error))
        with pytest.raises(type(error), match=f"trainer: {error}"):
            await sync_of(fleet, group, 3).publish(3)
        assert fleet.trainer_service.sync.phases()[-1] == ABORT
    assert group.epoch == 1


async def test_plans_that_differ_stop_the_round_before_bytes_move() -> None:
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.plan_digest = "other"
        with pytest.raises(TandemError, match="rollout-1 rank 0 made transfer plan other, but trainer rank 0 made"):
            await sync_of(fleet, FakeGroup(), min_replicas=2).publish(0)
        fleet.rollout_services[0].sync.seen.clear()
        assert all(TRANSFER not in service.sync.phases() for service in fleet.rollout_services)


@pytest.mark.parametrize("received", [1020, 1028])
async def test_a_rank_must_receive_exactly_its_shard(received: int) -> None:
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.received_bytes = received
        with pytest.raises(DigestMismatch, match=rf"rollout-1 rank 0 received {received} bytes for a shard of 1024"):
            await sync_of(fleet, FakeGroup(), min_replicas=2).publish(0)
        assert COMMIT not in fleet.rollout_services[1].sync.phases()


@pytest.mark.parametrize("error", [Aborted("gone"), DigestMismatch("digest differs")])
async def test_a_failed_commit_is_made_up_for_on_that_replica_alone(error: TandemError) -> None:
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.faults.append(Fault(COMMIT, error))
        result = await sync_of(fleet, FakeGroup(), 3).publish(3)
        assert [service.policy_version for service in fleet.rollout_services] == [3, 3]
        assert fleet.rollout_services[0].sync.phases() == ON_ROLLOUT
        assert fleet.rollout_services[1].sync.phases() == [*ON_ROLLOUT, ABORT, *ON_ROLLOUT]
    assert result.attempts == 2
    assert result.outcomes == {"rollout-0": ReplicaOutcome.COMMITTED, "rollout-1": ReplicaOutcome.COMMITTED}


@pytest.mark.parametrize("phase", [PREPARE, TRANSFER, COMMIT])
@pytest.mark.parametrize("install", ["in_place", "staged"])
async def test_a_replica_that_is_slow_in_a_phase_does_not_hold_the_others(
    phase: Phase, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(excluded_replicas, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(excluded_replicas, "COST_FACTOR", 0.0)
    warnings: list[str] = []
    async with fake_fleet(num_replicas=3) as fleet:
        slow = fleet.rollout_services[1]
        slow.stuck = {phase}
        group = FakeGroup()
        sync = sync_of(fleet, group, 3, install=install, straggler_timeout_s=0.2, warn=warnings.append)
        result = await sync.publish(3)
        assert [service.policy_version == 3 for service in fleet.rollout_services] == [True, False, True]
        name = slow.name
        assert {one for one, outcome in result.outcomes.items() if outcome is ReplicaOutcome.COMMITTED} == {
            replica.name for replica in fleet.replicas
        } - {name}
        (warning,) = warnings
        assert f"{name} took 0.2 s longer than the others in" in warning
        # In a round of its own it has as long as the others took, and must not hold them either.
        assert await sync.seed_late_joiners(3) is None
        assert slow.policy_version != 3
        slow.moves.set()
        await asyncio.to_thread(until, lambda: sync.left_out.is_due(fleet.replicas[1]))
        await sync.seed_late_joiners(3)
        assert slow.policy_version == 3


async def test_no_communicator_outlives_a_round_without_one_of_its_ranks() -> None:
    """A replica that was in the rounds of 1 and 3 must not use in 3 what the trainer has closed for that of 2."""
    async with fake_fleet() as fleet:
        members, group = StaticFleet(fleet.replicas), FakeGroup()
        sync = sync_of(fleet, group, members=members)
        of_first = fleet.rollout_services[0].sync.counts
        for version, replicas in enumerate(([0, 1], [0, 1], [0], [1], [0], [0])):
            members.admit([])
            members.look = _announce([fleet.replicas[index] for index in replicas])  # type: ignore[method-assign]
            fleet.trainer_service.policy_version = version
            await sync.publish(version)
        counts = list(of_first.values())
    assert counts == [1, 1, 2, 4, 4]


def _announce(replicas: Sequence[Replica]) -> Any:
    async def look() -> tuple[Replica, ...]:
        return tuple(replicas)

    return look


async def test_without_a_budget_a_slow_replica_is_waited_for() -> None:
    async with fake_fleet() as fleet:
        slow = fleet.rollout_services[1]
        slow.stuck = {TRANSFER}
        publishing = asyncio.create_task(sync_of(fleet, FakeGroup(), 3).publish(3))
        await asyncio.wait([publishing], timeout=0.5)
        assert not publishing.done()
        slow.moves.set()
        assert (await publishing).attempts == 1


async def test_a_replica_that_is_gone_does_not_stop_the_others() -> None:
    async with fake_fleet() as fleet:
        members = StaticFleet(fleet.replicas)
        sync = sync_of(fleet, FakeGroup(), members=members)
        await sync.publish(0)
        await fleet.servers["rollout-1"].drain(0.0)
        fleet.trainer_service.policy_version = 1
        result = await sync.publish(1)
    assert result.outcomes == {"rollout-0": ReplicaOutcome.COMMITTED}
    assert [replica.name for replica in members.serving()] == ["rollout-0"]


async def test_a_replica_that_dies_in_a_round_is_left_out_of_the_next_one() -> None:
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.faults.append(Fault(TRANSFER, Unavailable("socket closed")))
        fleet.rollout_services[1].gone_after_fault = True
        result = await sync_of(fleet, FakeGroup(), 3, install="staged").publish(3)
    assert result.attempts == 2
    # Staged: nothing was written before COMMIT, whatever has become of it.
    assert result.outcomes == {"rollout-0": ReplicaOutcome.COMMITTED, "rollout-1": ReplicaOutcome.ABORTED}


async def test_fewer_than_min_replicas_are_an_error_after_the_deadline() -> None:
    async with fake_fleet() as fleet:
        await fleet.servers["rollout-1"].drain(0.0)
        start_s = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            await sync_of(fleet, FakeGroup(), min_replicas=2, formation_timeout_s=1.0).publish(0)
        assert 1.0 <= time.monotonic() - start_s < 5.0
        assert fleet.rollout_services[0].sync.seen == []
    assert "the trainer and 2 replicas (rollout.min_replicas); replicas present: rollout-0; rollout-1: " in str(
        caught.value
    )


async def test_a_round_that_fails_while_the_run_is_to_end_is_not_tried_again() -> None:
    ending, group = asyncio.Event(), FakeGroup()
    ending.set()
    async with fake_fleet() as fleet:
        fleet.rollout_services[0].sync.faults.append(Fault(TRANSFER, PeerLost("no route")))
        with pytest.raises(PeerLost, match="try 1: rollout-0: no route"):
            await sync_of(fleet, group, 3, ending=ending).publish(3)
    assert group.epoch == 1


class LateFleet(StaticFleet):
    """Replicas that are announced from the fifth look on."""

    looks = 0

    async def look(self) -> tuple[Replica, ...]:
        self.looks += 1
        return await super().look() if self.looks >= 5 else ()


async def test_replicas_that_are_lost_are_waited_for_longer_than_a_round_needs_to_form() -> None:
    async with fake_fleet() as fleet:
        members = LateFleet(fleet.replicas)
        sync = sync_of(fleet, FakeGroup(), members=members, rejoin_timeout_s=600.0, formation_timeout_s=0.1)
        result = await sync.publish(0)
    assert members.looks >= 5
    assert set(result.outcomes.values()) == {ReplicaOutcome.COMMITTED}


# Shorter than the queues here.
SHORT: dict[str, Any] = {"rejoin_timeout_s": 0.3, "formation_timeout_s": 0.1}


class QueuedFleet(StaticFleet):
    """Replicas that are held in a queue, then start, and are announced; counted in looks."""

    def __init__(self, replicas: Sequence[Replica], queued: int, starting: int = 0) -> None:
        super().__init__(replicas)
        self.looks, self._queued, self._starting = 0, queued, starting

    def is_queued(self) -> bool:
        return self.looks <= self._queued

    async def look(self) -> tuple[Replica, ...]:
        self.looks += 1
        return await super().look() if self.looks > self._queued + self._starting else ()


async def test_replicas_that_are_queued_are_waited_for_as_long_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_fleet() as fleet:
        members = QueuedFleet(fleet.replicas, queued=10)  # for a second
        sync = sync_of(fleet, FakeGroup(), members=members, is_queued=members.is_queued, **SHORT)
        result = await sync.publish(0)
    assert members.looks > 10
    assert set(result.outcomes.values()) == {ReplicaOutcome.COMMITTED}
    said = [record.getMessage() for record in caplog.records]
    assert sum("others are queued: waiting as long as they are" in text for text in said) == 1
    assert sum("replicas are no longer queued" in text for text in said) == 1


async def test_behind_a_queue_the_time_to_rejoin_begins() -> None:
    async with fake_fleet() as fleet:
        members = QueuedFleet(fleet.replicas, queued=10, starting=1_000_000)
        sync = sync_of(fleet, FakeGroup(), members=members, is_queued=members.is_queued, **SHORT)
        with pytest.raises(DeadlineExceeded, match=r"waited 0.3 s for the trainer .* replicas present: none"):
            await asyncio.wait_for(sync.publish(0), 20.0)
    assert members.looks > 11


async def test_who_serves_does_not_wait_for_replicas_in_a_queue() -> None:
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, FakeGroup(), min_replicas=2, formation_timeout_s=0.1, is_queued=lambda: True)
        sync._fleet.admit(fleet.replicas[:1])
        await fleet.servers["rollout-1"].drain(0.0)
        assert await asyncio.wait_for(sync.seed_late_joiners(0), 20.0) is None


async def test_a_trainer_that_is_lost_is_not_waited_for_as_long_as_replicas_are() -> None:
    async with fake_fleet() as fleet:
        await fleet.servers["trainer"].drain(0.0)
        sync = sync_of(fleet, FakeGroup(), rejoin_timeout_s=600.0, formation_timeout_s=0.1, is_queued=lambda: True)
        with pytest.raises(DeadlineExceeded, match=r"waited 0.1 s for the trainer .* trainer: "):
            await asyncio.wait_for(sync.publish(0), 20.0)


async def test_who_serves_does_not_wait_long_for_joiners_that_are_lost() -> None:
    """Seeding is tried again later; those who serve have work to do."""
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, FakeGroup(), min_replicas=2, rejoin_timeout_s=600.0, formation_timeout_s=0.1)
        sync._fleet.admit(fleet.replicas[:1])
        await fleet.servers["rollout-1"].drain(0.0)
        assert await asyncio.wait_for(sync.seed_late_joiners(0), 20.0) is None


class HiddenFleet(StaticFleet):
    """Redis is away."""

    async def look(self) -> tuple[Replica, ...]:
        raise Unavailable("Redis does not answer")


async def test_who_serves_goes_on_while_the_registry_is_away() -> None:
    async with fake_fleet() as fleet:
        members = HiddenFleet(fleet.replicas)
        sync = sync_of(fleet, FakeGroup(), members=members)
        assert await sync.seed_late_joiners(0) is None
        members.admit([])
        with pytest.raises(Unavailable, match="Redis does not answer"):
            await sync.seed_late_joiners(0)


async def test_a_replica_without_its_slot_is_left_out() -> None:
    async with fake_fleet() as fleet:
        result = await sync_of(fleet, FakeGroup(empty=("rollout-1/0",))).publish(0)
        assert fleet.rollout_services[1].sync.seen == []
    assert result.outcomes == {"rollout-0": ReplicaOutcome.COMMITTED}


async def test_an_empty_slot_of_the_trainer_is_named() -> None:
    async with fake_fleet() as fleet:
        with pytest.raises(DeadlineExceeded, match="trainer: slots missing from tandem:test: trainer/1"):
            await sync_of(fleet, FakeGroup(empty=("trainer/1",)), formation_timeout_s=1.0).publish(0)
        assert fleet.trainer_service.sync.seen == []


async def test_outcomes_epoch_and_verify_failures_are_counted() -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"tandem_weight_sync_{name}", labels) or 0.0

    outcomes = {each.value: value("outcomes_total", outcome=each.value) for each in ReplicaOutcome}
    failures = value("verify_failures_total")
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.faults.append(Fault(VERIFY, DigestMismatch("digest differs")))
        result = await sync_of(fleet, FakeGroup()).publish(0)
    # The first round poisoned both (in the fake, bytes move in place), then each has one of its own.
    assert value("outcomes_total", outcome="poisoned") == outcomes["poisoned"] + 2
    assert value("outcomes_total", outcome="committed") == outcomes["committed"] + 2
    assert value("verify_failures_total") == failures + 1
    assert value("epoch") == result.epoch == 3
    assert value("rendezvous_wait_seconds_count") >= 2


async def test_a_late_joiner_is_seeded_alone_and_gets_work_then() -> None:
    async with fake_fleet() as fleet:
        first, second = fleet.replicas
        members = GrowingFleet([first])
        sync = sync_of(fleet, FakeGroup(), members=members)
        await sync.publish(0)
        assert await sync.seed_late_joiners(0) is None
        members.replicas.append(second)
        assert members.serving() == (first,)
        result = await sync.seed_late_joiners(0)
        assert result is not None
        assert result.outcomes == {"rollout-1": ReplicaOutcome.COMMITTED}
        assert members.serving() == (first, second)
        assert fleet.rollout_services[0].sync.phases() == ON_ROLLOUT  # it went on undisturbed


@pytest.mark.parametrize("serves", [False, True])
async def test_a_late_joiner_loads_what_the_last_round_has_left_on_disk(serves: bool) -> None:
    """Without a round; one that has weights, of whatever run, gets ours by a round."""
    async with fake_fleet() as fleet:
        first, second = fleet.replicas
        members = GrowingFleet([first])
        sync = sync_of(fleet, FakeGroup(), 4, members=members, transport="disk", disk_folder="/weights")
        await sync.publish(4)
        joiner = fleet.rollout_services[1]
        joiner.state = pb.REPLICA_STATE_SERVING if serves else pb.REPLICA_STATE_UNSEEDED
        members.replicas.append(second)
        result = await sync.seed_late_joiners(4)
        (load,) = joiner.loads
        assert (load.folder, load.policy_version) == ("/weights", 4)
        assert load.round_id == fleet.trainer_service.sync.seen[0][0]
        assert (result is not None, joiner.sync.phases() == ON_ROLLOUT) == (serves, serves)
        assert members.serving() == (first, second)
        assert (joiner.state, joiner.policy_version) == (pb.REPLICA_STATE_SERVING, 4)


async def test_what_is_on_disk_is_not_loaded_for_another_version() -> None:
    async with fake_fleet() as fleet:
        members = GrowingFleet([fleet.replicas[0]])
        sync = sync_of(fleet, FakeGroup(), 4, members=members, transport="disk", disk_folder="/weights")
        await sync.publish(4)
        members.replicas.append(fleet.replicas[1])
        fleet.trainer_service.policy_version = 5
        await sync.seed_late_joiners(5)
        assert fleet.rollout_services[1].loads == []
        assert fleet.rollout_services[1].policy_version == 5


async def test_a_late_joiner_that_fails_does_not_stop_the_run() -> None:
    async with fake_fleet() as fleet:
        first, second = fleet.replicas
        members = GrowingFleet([first])
        sync = sync_of(fleet, FakeGroup(), members=members)
        await sync.publish(0)
        members.replicas.append(second)
        fleet.rollout_services[1].sync.faults.extend([Fault(VERIFY, DigestMismatch("differs"))] * MAX_ROUNDS)
        assert await sync.seed_late_joiners(0) is None
        assert members.serving() == (first,)


async def test_a_trainer_with_another_version_is_not_published() -> None:
    async with fake_fleet() as fleet:
        with pytest.raises(WrongVersion, match="the trainer is at policy version 4, not at 5"):
            await sync_of(fleet, FakeGroup(), 4).publish(5)
        assert fleet.rollout_services[0].sync.seen == []


async def test_a_replica_that_is_ahead_is_left_out_until_the_run_has_passed_it() -> None:
    async with fake_fleet() as fleet:
        ahead = fleet.rollout_services[1]
        ahead.state, ahead.policy_version = pb.REPLICA_STATE_SERVING, 7
        members = GrowingFleet(fleet.replicas)
        sync = sync_of(fleet, FakeGroup(), 6, members=members)
        result = await sync.publish(6)
        assert result.outcomes == {"rollout-0": ReplicaOutcome.COMMITTED}
        assert members.serving() == (fleet.replicas[0],)
        assert ahead.sync.seen == []
        fleet.trainer_service.policy_version = 8
        assert (await sync.publish(8)).outcomes == dict.fromkeys(("rollout-0", "rollout-1"), ReplicaOutcome.COMMITTED)


async def test_when_all_replicas_are_ahead_the_error_says_what_to_do() -> None:
    async with fake_fleet() as fleet:
        for service in fleet.rollout_services:
            service.state, service.policy_version = pb.REPLICA_STATE_POISONED, 7
        with pytest.raises(StaleVersion, match=r"rollout-0: it has had version 7, and versions only grow.*--resume"):
            await sync_of(fleet, FakeGroup(), 6).publish(6)


async def test_a_coordinator_that_was_replaced_begins_no_round() -> None:
    class Lost(SoleLead):
        def confirm(self, epoch: int, slots: Iterable[str]) -> None:
            raise Evicted("coordinator: worker a no longer holds this slot of tandem:test")

    async with fake_fleet() as fleet:
        with pytest.raises(Evicted, match="try 1: coordinator: worker a no longer holds this slot"):
            await sync_of(fleet, FakeGroup(), lead=Lost()).publish(0)
        assert fleet.rollout_services[0].sync.seen == []


class GrowingFleet(StaticFleet):
    """Replicas that a test may add to; only admitted ones serve."""

    def __init__(self, replicas: list[Replica]) -> None:
        super().__init__(())
        self.replicas = replicas

    async def look(self) -> tuple[Replica, ...]:
        return tuple(self.replicas)
