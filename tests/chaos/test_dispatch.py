"""A dispatch over real processes that are killed in the middle of their calls: what is kept, and who does the rest."""

import asyncio
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from coordinator.generate.dispatch import Rollouts
from coordinator.generate.joiners import Patience
from coordinator.sync.weight_sync import WeightSync
from servicekit.redis.registry import Registry
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_clients.flow import Generation, Order, Prompt, Sampling
from tandem_clients.trainer import Trainer
from tandem_clients.watched_fleet import WatchedFleet
from tandem_config.schema import SyncSection
from tests.chaos.conftest import Fleets
from tests.chaos.fleet import REPLICAS, RUN_ID, ChaosFleet
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import Rendezvous

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PROMPTS = {f"g{i}": Prompt(row=i + 1, token_ids=array("I", [1, 2]), answer="3") for i in range(12)}
NUM_COMPLETIONS, NUM_TOKENS = 2, 5
WAIT_S = 30.0
LEASE_TTL_S = 1.2


@dataclass
class Dispatcher:
    """The coordinator's part, in this process."""

    rollouts: Rollouts
    warnings: list[str] = field(default_factory=list)

    def start(self, version: int) -> "asyncio.Task[Generation]":
        sampling = Sampling(temperature=1.0, max_new_tokens=NUM_TOKENS, stop_token_ids=())
        order = Order(policy_version=version, num_completions=NUM_COMPLETIONS, sampling=sampling)
        return asyncio.create_task(self.rollouts.generate(PROMPTS, order))


@asynccontextmanager
async def dispatcher_of(fleet: ChaosFleet) -> AsyncIterator[Dispatcher]:
    """Over the replicas that are announced, which serve."""
    registry = await asyncio.to_thread(Registry, fleet.redis.url, RUN_ID)
    (record,) = await asyncio.to_thread(registry.list, "trainer")
    group = await asyncio.to_thread(Rendezvous, fleet.redis.url, f"tandem:{RUN_ID}")
    lead = CoordinatorLease(group, LEASE_TTL_S)
    await asyncio.to_thread(lead.claim, WAIT_S)  # after those that have published: services do as the newest says
    trainer = Trainer(record.address, fence=lead.fence)
    watched = WatchedFleet(registry, trainer)
    settings = SyncSection(
        bucket_mib=0.004,
        formation_timeout_s=5.0,
        transfer_timeout_s=5.0,
        probe_timeout_s=2.0,
        lease_ttl_s=LEASE_TTL_S,
        transport="collective",
    )
    weights = WeightSync(
        trainer=trainer, fleet=watched, group=group, settings=settings, lead=lead, rejoin_timeout_s=WAIT_S
    )
    warnings: list[str] = []
    rollouts = Rollouts(
        fleet=watched,
        max_groups_per_call=4,  # each replica has a third, and no room for more
        timeout_s=WAIT_S,
        patience=Patience(probe_s=2.0, rejoin_s=WAIT_S, look_s=0.1),
        seed=weights.seed_late_joiners,
        warn=warnings.append,
    )
    try:
        watched.admit(await watched.look())
        yield Dispatcher(rollouts, warnings)
    finally:
        await watched.close()
        await trainer.close()
        await asyncio.to_thread(lead.close)
        await asyncio.to_thread(registry.close)


def groups_generated_by(fleet: ChaosFleet, *names: str) -> int:
    """Groups that the processes of these names that run now have finished."""
    return sum(fleet.status(name).generated_tokens for name in names) // (NUM_COMPLETIONS * NUM_TOKENS)


def check(fleet: ChaosFleet, generation: Generation) -> None:
    """Every group once and whole, by the current policy; nobody holds a mixture."""
    assert [group.group_id for group in generation.groups] == list(PROMPTS)
    completions = [completion for group in generation.groups for completion in group.completions]
    assert len(completions) == NUM_COMPLETIONS * len(PROMPTS)
    assert {completion.oldest_version for completion in completions} == {fleet.version}
    assert [fleet.mixture(name) for name in REPLICAS] == [""] * 3


async def test_all_replicas_are_killed_and_others_finish_what_they_left(fleets: Fleets) -> None:
    with fleets.whole() as fleet:
        gates = [fleet.gate(name) for name in REPLICAS]
        async with dispatcher_of(fleet) as dispatcher:
            for gate in gates:
                gate.arm("generate", 2)  # two of each one's four groups are sent
            generating = dispatcher.start(fleet.version)
            for name, gate in zip(REPLICAS, gates, strict=True):
                await asyncio.to_thread(gate.wait_reached, WAIT_S)
                fleet.send_signal(name, signal.SIGKILL)
                gate.open()
            for name in REPLICAS:
                await asyncio.to_thread(fleet.start_replica, name)
            generation = await asyncio.wait_for(generating, 2 * WAIT_S)
        await asyncio.to_thread(fleet.wait_announced)
        assert dispatcher.warnings[0].startswith("no replica is left: waiting for one to join")
        kept = len(PROMPTS) - groups_generated_by(fleet, *REPLICAS)
        assert 0 < kept <= 6
        check(fleet, generation)
        # Who came too late for the dispatch is seeded before the next one.
        assert fleet.publish()["serving"] == list(REPLICAS)


async def test_a_killed_replica_s_next_process_does_its_groups_while_others_work(fleets: Fleets) -> None:
    with fleets.whole() as fleet:
        gates = {name: fleet.gate(name) for name in REPLICAS}
        async with dispatcher_of(fleet) as dispatcher:
            for gate in gates.values():
                gate.arm("generate", 0)
            generating = dispatcher.start(fleet.version)
            for gate in gates.values():
                await asyncio.to_thread(gate.wait_reached, WAIT_S)
            fleet.send_signal("rollout-0", signal.SIGKILL)
            gates["rollout-0"].open()
            gates["rollout-0"].arm("generate", 0)
            await asyncio.to_thread(fleet.start_replica, "rollout-0")
            await asyncio.to_thread(gates["rollout-0"].wait_reached, WAIT_S)  # it has its work
            for name in ("rollout-1", "rollout-2"):
                status = await asyncio.to_thread(fleet.status, name)
                assert (status.state, status.running_groups) == (pb.REPLICA_STATE_SERVING, 4)
                assert not fleet.round_is_open(name)
            for gate in gates.values():
                gate.open()
            generation = await asyncio.wait_for(generating, WAIT_S)
        assert dispatcher.warnings == ["rollout-0 joined and is seeded: it generates groups that were waiting"]
        await asyncio.to_thread(fleet.wait_announced)
        assert groups_generated_by(fleet, "rollout-0") == 4
        check(fleet, generation)
