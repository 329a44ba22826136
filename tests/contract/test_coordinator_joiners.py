"""A dispatch whose replicas leave or die, over real gRPC: what is kept, who takes over, and when it gives up."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import REGISTRY

from coordinator.generate.dispatch import Rollouts
from coordinator.generate.joiners import Patience, Seed
from coordinator.sync.weight_sync import WeightSync
from servicekit.errors import Unavailable, WrongVersion
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import Generation, Order, Prompt, Sampling
from tandem_clients.replica import Replica
from tandem_config.schema import SyncSection
from tests.fakes.fake_fleet import FakeFleet, StaticFleet, fake_fleet
from tests.fakes.fake_rollout import FakeRollout, GenerateFault
from tests.fakes.fake_sync import FakeGroup
from tests.fakes.sole_lead import SoleLead
from tests.kit.folders import EOS, encode

VERSION = 3
# A dispatch that hangs fails its test then; none takes a tenth of it.
DEADLINE_S = 20.0
ORDER = Order(
    policy_version=VERSION,
    num_completions=2,
    sampling=Sampling(temperature=1.0, max_new_tokens=4, stop_token_ids=(EOS,)),
)
PROMPTS = {
    f"g{i}": Prompt(row=i + 1, token_ids=array("I", encode(f"{10 + i}+{20 + i}=")), answer=str(30 + 2 * i))
    for i in range(20)
}


class ChangingFleet(StaticFleet):
    """Replicas come and go as the test says; who goes serves no longer."""

    def __init__(self, replicas: list[Replica]) -> None:
        super().__init__(replicas)
        self.announced = list(replicas)
        self.on_look: Callable[[], None] = lambda: None

    async def look(self) -> tuple[Replica, ...]:
        self.on_look()
        self.admit([each for each in self.serving() if each in self.announced])
        return tuple(self.announced)


@dataclass
class Scene:
    """Services, those of them that are there at first, and a dispatch over them."""

    services: FakeFleet
    fleet: ChangingFleet
    patience: Patience
    warnings: list[str] = field(default_factory=list)
    on_warning: Callable[[], None] = lambda: None
    seed: Seed | None = None

    def generate(self, *, max_groups_per_call: int = 1024) -> "asyncio.Task[Generation]":
        rollouts = Rollouts(
            fleet=self.fleet,
            max_groups_per_call=max_groups_per_call,
            timeout_s=5.0,
            patience=self.patience,
            seed=self.weights().seed_late_joiners if self.seed is None else self.seed,
            warn=self._warn,
        )
        work = rollouts.generate(PROMPTS, ORDER)
        return asyncio.create_task(asyncio.wait_for(work, DEADLINE_S))

    def weights(self) -> WeightSync:
        settings = SyncSection(
            formation_timeout_s=0.2, transfer_timeout_s=1.0, probe_timeout_s=0.5, lease_ttl_s=0.1, transport="auto"
        )
        return WeightSync(
            trainer=self.services.trainer,
            fleet=self.fleet,
            group=FakeGroup(),
            settings=settings,
            lead=SoleLead(),
            rejoin_timeout_s=600.0,
        )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.on_warning()

    def joins(self, index: int) -> None:
        """Announced from now on."""
        self.fleet.announced.append(self.services.replicas[index])

    async def dies(self, index: int) -> None:
        """Answers no more, and is announced no more."""
        await self.services.servers[f"rollout-{index}"].drain(0.0)
        if self.services.replicas[index] in self.fleet.announced:
            self.fleet.announced.remove(self.services.replicas[index])


def scene_of(services: FakeFleet, at_first: int, *, rejoin_s: float = 600.0, probe_s: float = 5.0) -> Scene:
    """The first replicas serve the order's version, the others are not there yet and have no weights."""
    services.trainer_service.policy_version = VERSION
    for service in services.rollout_services[:at_first]:
        service.state, service.policy_version = weights_pb2.REPLICA_STATE_SERVING, VERSION
    fleet = ChangingFleet(services.replicas[:at_first])
    return Scene(services, fleet, Patience(probe_s=probe_s, rejoin_s=rejoin_s, look_s=0.02))


def asked(service: FakeRollout) -> list[str]:
    """Every group that a replica was asked for, in order."""
    return [group.group_id for request in service.requests for group in request.groups]


def counted(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


async def test_when_all_die_one_that_comes_is_seeded_and_does_what_was_left() -> None:
    stalls, joiners = counted("tandem_dispatch_stalls_total"), counted("tandem_dispatch_joiners_total")
    async with fake_fleet(num_replicas=3) as services:
        scene = scene_of(services, 2)
        first, second, joiner = services.rollout_services
        for service in (first, second):
            service.hold.clear()
            service.faults.append(GenerateFault(4, Unavailable("killed")))
        scene.on_warning = lambda: scene.joins(2) if services.replicas[2] not in scene.fleet.announced else None
        generating = scene.generate()
        for service in (first, second):
            await asyncio.wait_for(service.asked.wait(), DEADLINE_S)
        for index, service in enumerate((first, second)):
            service.hold.set()
            service.faults.extend([GenerateFault(0, Unavailable("killed"))] * 9)
            scene.fleet.announced.remove(services.replicas[index])
        generation = await generating
    assert [group.group_id for group in generation.groups] == list(PROMPTS)
    assert all(len(group.completions) == 2 for group in generation.groups)
    # What was finished before is kept: the joiner is asked for the twelve that were not, each once.
    kept = {*asked(first)[:4], *asked(second)[:4]}
    assert sorted(asked(joiner)) == sorted(PROMPTS.keys() - kept)
    assert {asked_of.min_policy_version for asked_of in joiner.requests} == {VERSION}
    assert joiner.sync.committed == VERSION
    # Those who were there have had no part in its round.
    assert first.sync.seen == second.sync.seen == []
    stalled = "no replica is left: waiting for one to join (rollout.rejoin_timeout_s, 600 s); 12 of 20"
    assert scene.warnings[0].startswith(stalled)
    assert scene.warnings[1] == "rollout-2 joined and is seeded: it generates groups that were waiting"
    assert counted("tandem_dispatch_stalls_total") == stalls + 1
    assert counted("tandem_dispatch_joiners_total") == joiners + 1


async def test_one_that_comes_while_others_work_takes_what_waits() -> None:
    async with fake_fleet(num_replicas=3) as services:
        scene = scene_of(services, 2)
        working, dying, joiner = services.rollout_services
        working.hold.clear()
        dying.faults.extend([GenerateFault(0, Unavailable("killed"))] * 2)
        scene.joins(2)
        generating = scene.generate()
        await asyncio.wait_for(joiner.asked.wait(), DEADLINE_S)
        assert not working.hold.is_set()
        working.hold.set()
        generation = await generating
    assert [group.group_id for group in generation.groups] == list(PROMPTS)
    assert sorted(asked(working) + asked(joiner)) == sorted(PROMPTS)
    assert working.sync.seen == []
    assert scene.warnings == ["rollout-2 joined and is seeded: it generates groups that were waiting"]


async def test_nobody_is_looked_for_while_no_group_waits() -> None:
    async with fake_fleet(num_replicas=2) as services:
        scene = scene_of(services, 1)
        services.rollout_services[0].hold.clear()
        looks: list[None] = []
        scene.fleet.on_look = lambda: looks.append(None)
        generating = scene.generate()
        await asyncio.wait_for(services.rollout_services[0].asked.wait(), DEADLINE_S)
        services.rollout_services[0].hold.set()
        await generating
    assert looks == []


async def test_a_dispatch_without_any_replica_waits_for_the_first() -> None:
    async with fake_fleet(num_replicas=1) as services:
        scene = scene_of(services, 0)
        scene.on_warning = lambda: scene.joins(0) if not scene.fleet.announced else None
        generation = await scene.generate()
    assert len(generation.groups) == 20


async def test_a_seeding_under_way_ends_before_the_dispatch_does() -> None:
    """The next round must not meet it."""
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def seed(policy_version: int) -> None:
        begun.set()
        await may_end.wait()
        ended.set()

    async with fake_fleet(num_replicas=1) as services:
        scene = scene_of(services, 1)
        scene.seed = seed
        services.rollout_services[0].hold.clear()
        generating = scene.generate(max_groups_per_call=10)
        await asyncio.wait_for(begun.wait(), DEADLINE_S)
        services.rollout_services[0].hold.set()
        _, pending = await asyncio.wait({generating}, timeout=0.3)
        assert pending
        may_end.set()
        generation = await generating
    assert len(generation.groups) == 20
    assert ended.is_set()


async def test_when_nobody_comes_the_error_names_all_and_the_deadline() -> None:
    async with fake_fleet(num_replicas=2) as services:
        scene = scene_of(services, 2, rejoin_s=0.3)
        for index in range(2):
            await scene.dies(index)
        with pytest.raises(Unavailable) as caught:
            await scene.generate()
    text = str(caught.value)
    assert text.startswith("20 of 20 groups could not be generated, every replica failed: rollout-0: ")
    assert "; rollout-1: " in text
    assert text.endswith("; none came within 0.3 s (rollout.rejoin_timeout_s)")


async def test_the_time_to_join_does_not_run_while_replicas_are_queued() -> None:
    """All were preempted, and their queue has them again."""
    queued = [True]
    async with fake_fleet(num_replicas=1) as services:
        scene = scene_of(services, 1, rejoin_s=0.3)
        scene.patience = replace(scene.patience, is_queued=lambda: queued[0])
        await scene.dies(0)
        generating = scene.generate()
        _, pending = await asyncio.wait({generating}, timeout=1.5)
        assert pending
        queued[0] = False
        with pytest.raises(Unavailable, match=r"none came within 0.3 s"):
            await generating


async def test_replicas_that_are_there_and_fail_are_not_waited_for() -> None:
    """Nobody would come in their place: the error comes long before rollout.rejoin_timeout_s."""
    async with fake_fleet(num_replicas=1) as services:
        scene = scene_of(services, 1, rejoin_s=600.0, probe_s=0.2)
        services.rollout_services[0].faults.extend([GenerateFault(0, Unavailable("out of memory"))] * 9)
        with pytest.raises(Unavailable, match=r"rollout-0: out of memory$"):
            await scene.generate()
    assert len(services.rollout_services[0].requests) == 2


async def test_those_that_come_only_to_fail_do_not_put_the_deadline_off() -> None:
    """A prompt that kills every engine must not keep a run for ever."""
    async with fake_fleet(num_replicas=1) as services:
        scene = scene_of(services, 1, rejoin_s=0.5)
        services.rollout_services[0].faults.extend([GenerateFault(0, Unavailable("killed"))] * 10_000)

        def another_process() -> None:
            scene.fleet.announced = [Replica("rollout-0", services.addresses["rollout-0"])]
            services.rollout_services[0].state = weights_pb2.REPLICA_STATE_UNSEEDED

        scene.fleet.on_look = another_process
        with pytest.raises(Unavailable, match=r"20 of 20 groups .* none came within 0.5 s"):
            await scene.generate()
    assert len(services.rollout_services[0].requests) > 2


async def test_a_trainer_that_has_another_version_ends_the_wait_by_name() -> None:
    async with fake_fleet(num_replicas=2) as services:
        scene = scene_of(services, 1)
        services.trainer_service.policy_version = VERSION - 1
        await scene.dies(0)
        scene.joins(1)
        with pytest.raises(WrongVersion, match="the trainer is at policy version 2, not at 3"):
            await scene.generate()


async def test_a_trainer_that_is_lost_too_is_not_waited_for_as_long() -> None:
    """Nobody could seed the replicas that come; who brings it back goes on from a checkpoint."""
    async with fake_fleet(num_replicas=1) as services:
        scene = scene_of(services, 1, rejoin_s=600.0)
        await services.servers["trainer"].drain(0.0)
        await scene.dies(0)
        with pytest.raises(Unavailable, match=r"20 of 20 groups .*rollout-0: .* waited 0.2 s for the trainer"):
            await scene.generate()
