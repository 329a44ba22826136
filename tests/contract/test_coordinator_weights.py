"""The weight-sync round as a transaction, over real gRPC: order of phases, checks, abort, retry, names in errors."""

import time
from collections.abc import Iterable

import pytest

from coordinator.weights import MAX_ROUNDS, WeightSync
from servicekit.errors import (
    Aborted,
    DeadlineExceeded,
    DigestMismatch,
    InvalidRequest,
    PeerLost,
    StaleVersion,
    TandemError,
    Unavailable,
)
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_config.schema import SyncSection
from tests.fakes.fake_fleet import FakeFleet, fake_fleet
from tests.fakes.fake_sync import ABORT, COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY, FakeGroup, FakeMembership, Fault

ON_ROLLOUT = [PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT]
ON_TRAINER = [PREPARE, TRANSFER, COMMIT]


def sync_of(fleet: FakeFleet, group: FakeGroup) -> WeightSync:
    settings = SyncSection(formation_timeout_s=1.0, transfer_timeout_s=1.0, install="staged", bucket_mib=0.5)
    return WeightSync(trainer=fleet.trainer, replicas=fleet.replicas, group=group, settings=settings)


async def test_a_round_goes_through_its_phases_in_order() -> None:
    group = FakeGroup()
    async with fake_fleet(tensor_parallel=2) as fleet:
        fleet.trainer_service.policy_version = 7
        fleet.rollout_services[0].sync.seconds = {"transfer": 0.25}
        result = await sync_of(fleet, group).publish(7)
    assert fleet.trainer_service.sync.phases() == ON_TRAINER
    for service in fleet.rollout_services:
        assert service.sync.phases() == ON_ROLLOUT
        assert (service.state, service.policy_version) == (pb.REPLICA_STATE_SERVING, 7)
    assert group.asked == [("trainer/0", "trainer/1", "rollout-0/0", "rollout-0/1", "rollout-1/0", "rollout-1/1")]
    assert (result.attempts, result.redundancy, result.bytes_per_rollout_rank) == (1, 1.0, 512)
    # The slowest participant is what counts.
    assert result.stages == {"prepare": 0.001, "pause": 0.001, "transfer": 0.25, "verify": 0.001, "commit": 0.001}


async def test_every_participant_gets_the_same_round() -> None:
    async with fake_fleet() as fleet:
        await sync_of(fleet, FakeGroup()).publish(0)
    seen = [fleet.trainer_service.sync.seen, *(service.sync.seen for service in fleet.rollout_services)]
    assert len({round_id for calls in seen for round_id, _ in calls}) == 1


@pytest.mark.parametrize("phase", [PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT])
@pytest.mark.parametrize("error", [Aborted("gone"), PeerLost("peer lost"), DigestMismatch("digest differs")])
async def test_a_failed_round_is_aborted_everywhere_and_tried_in_a_new_epoch(phase: int, error: TandemError) -> None:
    group = FakeGroup()
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.faults.append(Fault(phase, error))
        result = await sync_of(fleet, group).publish(3)
        for sync in (fleet.trainer_service.sync, *(service.sync for service in fleet.rollout_services)):
            first, second = dict.fromkeys(round_id for round_id, _ in sync.seen)
            assert (first, ABORT) in sync.seen
            assert (second, COMMIT) in sync.seen
        assert [service.policy_version for service in fleet.rollout_services] == [3, 3]
    assert result.attempts == 2
    assert group.epoch == 2


async def test_a_lost_reply_to_commit_is_asked_for_again() -> None:
    async with fake_fleet() as fleet:
        fault = Fault(COMMIT, Unavailable("connection reset"), lost_reply=True)
        fleet.rollout_services[0].sync.faults.append(fault)
        result = await sync_of(fleet, FakeGroup()).publish(3)
        assert result.attempts == 1
        assert ABORT not in fleet.rollout_services[0].sync.phases()
        assert [service.policy_version for service in fleet.rollout_services] == [3, 3]


async def test_the_budget_ends_and_the_error_names_participant_and_states() -> None:
    group = FakeGroup()
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.faults.extend([Fault(TRANSFER, PeerLost("no route"))] * MAX_ROUNDS)
        with pytest.raises(PeerLost) as caught:
            await sync_of(fleet, group).publish(3)
    assert str(caught.value).startswith("weight sync of version 3, try 3: rollout-1: no route; ")
    assert "rollout-0 is poisoned at version 0" in str(caught.value)
    assert group.epoch == MAX_ROUNDS


@pytest.mark.parametrize("error", [StaleVersion("version 3 is older"), InvalidRequest("the round does not fit")])
async def test_an_error_that_would_come_again_is_not_tried_again(error: TandemError) -> None:
    group = FakeGroup()
    async with fake_fleet() as fleet:
        fleet.rollout_services[0].sync.faults.append(Fault(PREPARE, error))
        with pytest.raises(type(error), match=f"rollout-0: {error}"):
            await sync_of(fleet, group).publish(3)
        assert fleet.trainer_service.sync.phases()[-1] == ABORT
    assert group.epoch == 1


async def test_plans_that_differ_stop_the_round_before_bytes_move() -> None:
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.plan_digest = "other"
        with pytest.raises(TandemError, match="rollout-1 rank 0 made transfer plan other, but trainer rank 0 made"):
            await sync_of(fleet, FakeGroup()).publish(0)
        assert all(TRANSFER not in service.sync.phases() for service in fleet.rollout_services)


@pytest.mark.parametrize("received", [1020, 1028])
async def test_a_rank_must_receive_exactly_its_shard(received: int) -> None:
    async with fake_fleet() as fleet:
        fleet.rollout_services[1].sync.received_bytes = received
        with pytest.raises(DigestMismatch, match=rf"rollout-1 rank 0 received {received} bytes for a shard of 1024"):
            await sync_of(fleet, FakeGroup()).publish(0)
        assert all(COMMIT not in service.sync.phases() for service in fleet.rollout_services)


async def test_a_replica_that_is_gone_is_named_and_waited_for_once() -> None:
    async with fake_fleet() as fleet:
        sync = sync_of(fleet, FakeGroup())
        await sync.publish(0)
        await fleet.servers["rollout-1"].drain(0.0)
        start_s = time.monotonic()
        with pytest.raises(TandemError) as caught:
            await sync.publish(1)
        # sync.formation_timeout_s is 1 s here.
        assert time.monotonic() - start_s < 5.0
    assert str(caught.value).startswith("weight sync of version 1, try 2: rollout-1: ")
    assert "rollout-1 does not answer" in str(caught.value)
    assert "rollout-0 is serving at version 0" in str(caught.value)


async def test_an_empty_slot_is_named() -> None:
    class Missing(FakeGroup):
        def wait_for(self, slots: Iterable[str], timeout_s: float) -> FakeMembership:
            raise DeadlineExceeded("slots missing from tandem:test: rollout-1/0")

    async with fake_fleet() as fleet:
        with pytest.raises(DeadlineExceeded, match="slots missing from tandem:test: rollout-1/0"):
            await sync_of(fleet, Missing()).publish(0)
        assert fleet.trainer_service.sync.seen == []
