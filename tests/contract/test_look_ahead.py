"""A look at the services while the trainer works is the next round's roll call, unless something has changed since."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from coordinator.sync import look_ahead
from coordinator.sync.weight_sync import WeightSync
from servicekit.errors import Aborted, Unavailable
from servicekit.lifecycle.tasks import cancel
from tandem_clients.flow import ReplicaOutcome
from tests.contract.test_coordinator_weights import sync_of
from tests.fakes.fake_fleet import FakeFleet, StaticFleet, fake_fleet
from tests.fakes.fake_sync import FakeGroup
from tests.fakes.sole_lead import SoleLead
from tests.kit.waiting import until

pytestmark = pytest.mark.integration


class CountingFleet(StaticFleet):
    """Counts the looks at it."""

    looks = 0

    async def look(self) -> Any:
        self.looks += 1
        return await super().look()


class LeaderLease(SoleLead):
    """Refuses to confirm the epochs of `refused`, each with its error."""

    def __init__(self, refused: dict[int, Exception]) -> None:
        self.refused = refused

    def confirm(self, epoch: int, slots: Iterable[str]) -> None:
        if epoch in self.refused:
            raise self.refused[epoch]


async def look_on(sync: WeightSync) -> None:
    async for _ in sync.look_ahead():
        pass


@asynccontextmanager
async def seen_ahead(**options: Any) -> AsyncIterator[tuple[FakeFleet, CountingFleet, FakeGroup, WeightSync]]:
    """A fleet that serves version 0, at which the coordinator has looked once while the trainer made version 1."""
    async with fake_fleet() as fleet:
        members, group = CountingFleet(fleet.replicas), FakeGroup()
        sync = sync_of(fleet, group, 0, members=members, **options)
        await sync.publish(0)
        looking = asyncio.create_task(look_on(sync))
        before = members.looks
        await asyncio.to_thread(until, lambda: sync._ahead._seen)
        await cancel(looking)
        assert members.looks == before + 1
        fleet.trainer_service.policy_version = 1
        yield fleet, members, group, sync


async def test_a_round_and_the_next_generation_take_the_look_that_was_made_ahead() -> None:
    async with seen_ahead() as (fleet, members, group, sync):
        looks, settled = members.looks, len(group.asked)
        result = await sync.publish(1)
        assert await sync.seed_late_joiners(1) is None
        assert (members.looks, len(group.asked)) == (looks, settled)
        assert (result.attempts, set(result.outcomes.values())) == (1, {ReplicaOutcome.COMMITTED})
        assert all(service.policy_version == 1 for service in fleet.rollout_services)


async def _disconnected(fleet: FakeFleet, sync: WeightSync) -> None:
    await fleet.servers["rollout-1"].drain(0.0)
    await asyncio.to_thread(until, lambda: not fleet.replicas[1].is_connected)


async def _not_serving(fleet: FakeFleet, sync: WeightSync) -> None:
    sync._fleet.admit(fleet.replicas[:1])


async def _newer(fleet: FakeFleet, sync: WeightSync) -> None:
    for status in sync._ahead._seen.present.replicas.values():  # type: ignore[union-attr]
        status.policy_version = 2


async def _old(fleet: FakeFleet, sync: WeightSync) -> None:
    object.__setattr__(sync._ahead._seen, "begun_s", sync._ahead._seen.begun_s - look_ahead.AHEAD_S)  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [_disconnected, _not_serving, _newer, _old])
async def test_a_look_that_something_contradicts_is_made_again(change: Callable[..., Any]) -> None:
    async with seen_ahead() as (fleet, members, _, sync):
        await change(fleet, sync)
        looks = members.looks
        result = await sync.publish(1)
        assert members.looks > looks
        committed = {name for name, outcome in result.outcomes.items() if outcome is ReplicaOutcome.COMMITTED}
        assert committed == ({"rollout-0"} if change is _disconnected else {"rollout-0", "rollout-1"})
        assert result.attempts == (2 if change is _not_serving else 1)  # who has served comes first


@pytest.mark.parametrize("error", [Aborted("epoch 2 is over"), Unavailable("Redis does not answer")])
async def test_a_group_that_has_changed_is_looked_at_again_and_costs_no_round(error: Exception) -> None:
    lead = LeaderLease({})
    async with seen_ahead(lead=lead) as (_, members, group, sync):
        lead.refused = {group.epoch: error}
        looks = members.looks
        result = await sync.publish(1)
        assert (members.looks, result.attempts) == (looks + 1, 1)
        assert "retries" not in result.stages


async def test_a_look_ahead_goes_on_while_a_service_is_lost() -> None:
    """The one that is lost is left to the round's own roll call."""
    async with seen_ahead() as (fleet, _, _, sync):
        await fleet.servers["rollout-1"].drain(0.0)
        looking = asyncio.create_task(look_on(sync))
        await asyncio.to_thread(until, lambda: sync._ahead._seen is None)
        assert not looking.done()
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
