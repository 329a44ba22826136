"""Replicas that join are seeded by one that serves: whether the trainer works, is away, or wants to publish next."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import REGISTRY

from coordinator.sync import publish_attempt, weight_sync
from coordinator.sync.weight_sync import WeightSync
from coordinator.watch.fleet_recorder import FleetRecorder
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, DigestMismatch, Internal, NotReady, PeerLost, TandemError, Unavailable
from servicekit.lifecycle.tasks import cancel
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_clients.replica import Replica
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import account_of, attempt, trained, with_settings
from tests.contract.test_coordinator_weights import ON_ROLLOUT, ON_TRAINER, GrowingFleet, sync_of
from tests.fakes.fake_fleet import FakeFleet, announced, announced_fleet, fake_fleet, served
from tests.fakes.fake_rollout import FakeRollout
from tests.fakes.fake_sync import FakeGroup, Fault
from tests.kit.waiting import until
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY

VERSION = 4
OF_A_SOURCE = [PREPARE, TRANSFER, COMMIT]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "LOOK_S", 0.01)
    monkeypatch.setattr(publish_attempt, "SEEDING_MAY_TAKE_S", 0.1)


@dataclass
class Scene:
    """Some replicas serve VERSION, and `run_seeding` runs; the others have not come yet."""

    fleet: FakeFleet
    members: GrowingFleet
    sync: WeightSync
    observed: FleetRecorder
    told: list[str] = field(default_factory=list)

    def joins(self, *indices: int) -> None:
        self.members.replicas = [*self.members.replicas, *(self.fleet.replicas[index] for index in indices)]

    async def until(self, condition: Callable[[], object]) -> None:
        await asyncio.to_thread(until, condition)

    async def until_serving(self, *indices: int) -> None:
        names = {f"rollout-{index}" for index in indices}
        await self.until(lambda: {replica.name for replica in self.members.serving()} == names)

    async def until_seen(self, process: Replica) -> None:
        await self.until(lambda: self.sync.left_out._lives[process.name].replica is process)

    def service(self, index: int) -> FakeRollout:
        return self.fleet.rollout_services[index]

    def breaks(self, index: int, phase: Any, error: TandemError, times: int = 1000) -> None:
        self.service(index).sync.faults.extend([Fault(phase, error)] * times)

    async def trainer_seeds(self) -> None:
        """What a schedule asks for between two steps."""
        await self.sync.seed_late_joiners(VERSION)

    async def publish_next(self) -> Any:
        self.fleet.trainer_service.policy_version += 1
        return await asyncio.wait_for(self.sync.publish(self.fleet.trainer_service.policy_version), 10.0)


@asynccontextmanager
async def scene(
    *, at_first: int = 1, num_replicas: int = 3, published: bool = True, **options: Any
) -> AsyncIterator[Scene]:
    async with fake_fleet(num_replicas=num_replicas) as fleet:
        members, observed = GrowingFleet(fleet.replicas[:at_first]), FleetRecorder()
        told: list[str] = []
        sync = sync_of(fleet, FakeGroup(), VERSION, members=members, observed=observed, warn=told.append, **options)
        if published:
            await sync.publish(VERSION)
        for service in fleet.rollout_services:
            service.sync.seen.clear()
        fleet.trainer_service.sync.seen.clear()
        seeding = asyncio.create_task(sync.run_seeding())
        await asyncio.to_thread(until, lambda: sync._replicas_seed)
        try:
            yield Scene(fleet, members, sync, observed, told)
        finally:
            await cancel(seeding)


def seeded(sender: str) -> float:
    return REGISTRY.get_sample_value("tandem_joiner_seeding_seconds_count", {"sender": sender}) or 0.0


async def test_the_least_loaded_replica_seeds_a_joiner_and_the_trainer_has_no_part() -> None:
    before = seeded("replica")
    async with scene(at_first=2) as them:
        them.service(0).running_groups, them.service(1).running_groups = 7, 3
        await them.fleet.servers["trainer"].drain(0.0)
        them.joins(2)
        await them.until_serving(0, 1, 2)
        assert (them.service(2).state, them.service(2).policy_version) == (pb.REPLICA_STATE_SERVING, VERSION)
        assert them.service(2).sync.phases() == ON_ROLLOUT
        assert them.service(1).sync.phases() == OF_A_SOURCE
        assert them.service(0).sync.seen == them.fleet.trainer_service.sync.seen == []
        assert (them.observed.rounds[-1].source, them.observed.rounds[-1].policy_version) == ("rollout-1", VERSION)
    assert seeded("replica") == before + 1


async def test_joiners_of_a_moment_are_one_chain() -> None:
    async with scene() as them:
        them.joins(1, 2)
        await them.until_serving(0, 1, 2)
        assert len({round_id for round_id, _ in them.service(0).sync.seen}) == 1
        assert them.service(1).sync.seen[0][0] == them.service(2).sync.seen[0][0]


async def test_the_trainer_leaves_joiners_to_those_that_serve() -> None:
    async with scene() as them:
        them.joins(1)
        for _ in range(3):
            await them.trainer_seeds()
        await them.until_serving(0, 1)
        assert them.fleet.trainer_service.sync.seen == []


async def test_before_anything_was_published_nobody_seeds() -> None:
    async with scene(published=False) as them:
        them.joins(1)
        await them.sync.publish(VERSION)
        assert {replica.name for replica in them.members.serving()} == {"rollout-0", "rollout-1"}
        assert them.observed.rounds[0].source == ""


async def test_a_publication_waits_for_a_seeding_that_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_attempt, "SEEDING_MAY_TAKE_S", 60.0)
    async with scene() as them:
        them.service(1).stuck = {TRANSFER}
        them.joins(1)
        await them.until(lambda: PREPARE in them.service(1).sync.phases())
        publishing = asyncio.create_task(them.publish_next())
        await asyncio.wait([publishing], timeout=0.2)
        assert not publishing.done()
        them.service(1).moves.set()
        result = await publishing
        assert (result.attempts, set(result.outcomes)) == (1, {"rollout-0", "rollout-1"})
        assert ABORT not in them.service(0).sync.phases()


async def test_a_seeding_that_holds_up_a_publication_is_given_up_and_blames_nobody() -> None:
    async with scene() as them:
        them.service(1).stuck = {TRANSFER}
        them.joins(1)
        await them.until(lambda: PREPARE in them.service(1).sync.phases())
        publishing = asyncio.create_task(them.publish_next())
        await them.until(lambda: ABORT in them.service(0).sync.phases())
        them.service(1).moves.set()
        await publishing
        assert them.service(0).policy_version == VERSION + 1
        assert (them.sync.left_out.troubles(), them.told) == ([], [])
        await them.until_serving(0, 1)
        assert them.service(1).policy_version == VERSION + 1


async def test_a_joiner_that_answers_nothing_more_does_not_hold_up_a_publication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene() as them:
        rounds = them.fleet.replicas[1].rounds
        run_phases = rounds.run_phases

        async def frozen_while_seeded(phases: Any, round_: pb.Round) -> Any:
            return await (forever() if round_.source else run_phases(phases, round_))

        monkeypatch.setattr(rounds, "run_phases", frozen_while_seeded)
        them.joins(1)
        await them.until(lambda: PREPARE in them.service(0).sync.phases())
        result = await them.publish_next()
        assert (result.attempts, set(result.outcomes)) == (2, {"rollout-0", "rollout-1"})
        assert [sync.error for sync in them.observed.rounds] == ["", ""], "what is given up for it is no failure"


@pytest.mark.parametrize("phase", [PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT])
@pytest.mark.parametrize("error", [Internal("out of memory"), Unavailable("no route"), DigestMismatch("differs")])
async def test_a_joiner_that_fails_harms_neither_source_nor_other_joiners(phase: int, error: TandemError) -> None:
    async with scene() as them:
        them.breaks(1, phase, error)
        them.joins(1, 2)
        await them.until_serving(0, 2)
        # The first failure may be an accident, which is found out immediately.
        await them.until(lambda: "times" in them.sync.left_out.reasons().get("rollout-1", ""))
        assert (them.service(0).state, them.service(0).policy_version) == (pb.REPLICA_STATE_SERVING, VERSION)
        assert str(error) in them.sync.left_out.troubles()[0]
        assert not any("rollout-0" in text.partition(":")[0] for text in them.told)
        result = await them.publish_next()
        assert result.attempts == 1, "the publication does not meet it"


@pytest.mark.parametrize("phase", [PREPARE, TRANSFER])
@pytest.mark.parametrize("error", [NotReady("it has version 3"), Unavailable("gone"), PeerLost("lost rollout-2/0")])
async def test_when_one_source_fails_another_is_asked(phase: int, error: TandemError) -> None:
    async with scene(at_first=2) as them:
        them.service(1).running_groups = 5  # so that the first one is asked first
        them.breaks(0, phase, error)
        if phase == TRANSFER:
            them.breaks(2, phase, PeerLost("rollout-2/0: lost rollout-0/0"), times=1)
        them.joins(2)
        await them.until_serving(0, 1, 2)
        assert them.service(1).sync.phases()[-3:] == OF_A_SOURCE
        assert them.service(0).state == pb.REPLICA_STATE_SERVING
        assert "rollout-0 does not seed replicas that join for some time" in "".join(them.told)


async def test_a_joiner_that_no_replica_can_seed_is_the_trainers() -> None:
    """Each says of itself that it may not send, as over NCCL; the joiner, which says the same, is not blamed."""
    async with scene(at_first=2) as them:
        for index in (0, 1):
            them.breaks(index, PREPARE, ConfigError("it may hang"), times=1)
        them.breaks(2, PREPARE, ConfigError("it may hang"), times=2)
        them.joins(2)
        await them.until(lambda: them.fleet.replicas[2] in them.sync._sources.unserved)
        assert them.sync.left_out.troubles() == []
        await them.trainer_seeds()
        assert len(them.members.serving()) == 3
        assert them.fleet.trainer_service.sync.phases() == ON_TRAINER


async def test_a_joiner_of_a_layout_that_none_serves_is_the_trainers() -> None:
    async with scene() as them:
        joiner = them.service(1)
        joiner.tensor_parallel = joiner.sync.num_ranks = 2
        them.joins(1, 2)
        await them.until_serving(0, 2)
        await them.until(lambda: them.sync._sources.unserved == {them.fleet.replicas[1]})
        assert joiner.sync.seen == []
        await them.trainer_seeds()
        assert (len(them.members.serving()), joiner.sync.phases()) == (3, ON_ROLLOUT)


async def test_a_source_whose_own_bytes_have_changed_is_told_and_seeded_itself() -> None:
    async with scene(at_first=2) as them:
        them.service(1).running_groups = 5
        them.breaks(0, TRANSFER, DigestMismatch("2 of 9 messages differ from what this source has verified"), times=1)
        them.joins(2)
        await them.until_serving(0, 1, 2)
        assert COMMIT in them.service(0).sync.phases()
        assert VERIFY in them.service(0).sync.phases(), "as a receiver"
        assert "rollout-0: 2 of 9 messages differ" in "".join(them.told)


async def test_a_replica_that_is_started_again_and_again_costs_less_and_less_and_publications_nothing() -> None:
    """Two processes die as soon as they serve; those that come then are frozen, and no answer is waited for."""
    async with scene() as them:
        first = them.fleet.replicas[0]
        for number in range(6):
            them.service(1).state = pb.REPLICA_STATE_UNSEEDED
            process = Replica("rollout-1", them.fleet.addresses["rollout-1"])
            if number > 1:
                process.status = forever  # type: ignore[method-assign]
            them.members.replicas = [first, process]
            if number < 2:
                await them.until_serving(0, 1)
                them.members.replicas = [first]
                them.members.admit([first])
            else:
                await them.until_seen(process)
            assert (await asyncio.wait_for(them.publish_next(), 5.0)).attempts == 1, number
        assert len({round_id for round_id, _ in them.service(1).sync.seen}) == 2
        (trouble,) = them.sync.left_out.troubles()
        assert "rollout-1 is left out of weight syncs since" in trouble
        assert "its last 5 processes ended before they had served for 60 s" in trouble


async def forever(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


async def test_over_the_transport_disk_joiners_read_files_and_ask_no_replica() -> None:
    before = seeded("disk")
    async with scene(transport="disk", disk_folder="/weights") as them:
        them.joins(1)
        await them.until_serving(0, 1)
        assert len(them.service(1).loads) == 1
        assert them.service(0).sync.seen == them.service(1).sync.seen == []
    assert seeded("disk") == before + 1


async def test_a_replica_that_is_ahead_is_not_seeded() -> None:
    async with scene() as them:
        ahead = them.service(1)
        ahead.state, ahead.policy_version = pb.REPLICA_STATE_SERVING, VERSION + 3
        them.joins(1, 2)
        await them.until_serving(0, 2)
        assert (ahead.sync.seen, ahead.policy_version) == ([], VERSION + 3)


@pytest.mark.parametrize("kind", ["sync", "one_step_off", "async"])
async def test_under_every_schedule_one_that_joins_in_a_train_step_is_seeded_in_it(
    kind: str, config: RunConfig, environment: ServiceEnvironment
) -> None:
    correction = {} if kind == "sync" else {"correction": "importance"}
    config = with_settings(config, schedule={"kind": kind}, grpo=correction, run={"evaluate_every": 6})
    joiner, served_in_step = FakeRollout(name="rollout-2"), list[int]()
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet, AsyncExitStack() as stack:

        async def join(step: int) -> None:
            if step != 2:
                return
            _, address = await stack.enter_async_context(served(joiner))
            there = announced(environment.redis_url, environment.run_id, joiner.name, address, ["rollout-2/0"])
            await stack.enter_async_context(there)
            await asyncio.to_thread(until, lambda: joiner.state == pb.REPLICA_STATE_SERVING)
            served_in_step.append(joiner.policy_version)

        fleet.trainer_service.before_step = join
        assert await attempt(config, environment, resume=False) == 0
        by_trainer = {round_id for round_id, _ in fleet.trainer_service.sync.seen}
        by_replicas = {round_id for one in fleet.rollout_services for round_id, _ in one.sync.seen}
    assert served_in_step == [1]
    assert joiner.sync.seen[0][0] in by_replicas - by_trainer
    assert joiner.policy_version == config.run.iterations
    assert {group.group_id[0] for request in joiner.requests for group in request.groups} >= {"i"}
    counts = trained(fleet.trainer_service)
    assert set(counts.values()) == {1}
    assert account_of(environment).under_way == 0
