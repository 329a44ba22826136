"""A rank that loses its slot during a round is lost; Redis that is away, or has lost its data, loses nobody."""

import asyncio
from contextlib import suppress

import pytest

from coordinator.sync import slot_watch
from coordinator.sync.slot_watch import SlotWatch
from servicekit.errors import Unavailable
from servicekit.lifecycle.tasks import cancel
from tandem_clients.probing import NoAnswer
from tests.fakes.fake_sync import FakeGroup
from weightsync.membership.rendezvous import Membership

TRAINER, REPLICAS = ["trainer/0"], {"rollout-0": ["rollout-0/0"], "rollout-1": ["rollout-1/0", "rollout-1/1"]}
ALL = {"trainer/0", "rollout-0/0", "rollout-1/0", "rollout-1/1"}


class Looks(FakeGroup):
    """A group of which each look sees the next of `seen`, the last one for ever; None: Redis is away."""

    def see(self, *seen: set[str] | None) -> "Looks":
        self.seen, self.over = list(seen), asyncio.Event()
        self.loop = asyncio.get_running_loop()
        return self

    def settle(self, slots: object, timeout_s: float) -> Membership:
        self.epoch += 1
        if self.epoch == len(self.seen) + 2:
            self.loop.call_soon_threadsafe(self.over.set)
        now = self.seen[min(self.epoch, len(self.seen)) - 1]
        if now is None:
            raise Unavailable("Redis does not answer")
        return Membership(epoch=1, members=dict.fromkeys(now, "worker"), endpoint=None)


async def lost(group: Looks) -> set[str]:
    """The replicas that are lost when everything was seen."""
    watch = SlotWatch(group, TRAINER, REPLICAS, lease_ttl_s=60.0)
    tasks = {name: asyncio.create_task(watch.until_lost(name)) for name in REPLICAS}
    running = asyncio.create_task(watch.run())
    await asyncio.wait_for(group.over.wait(), 10.0)
    found = {name for name, task in tasks.items() if task.done()}
    for task in (running, *tasks.values()):
        with suppress(NoAnswer):
            await cancel(task)
    return found


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([ALL], set()),
        ([ALL, ALL - {"rollout-1/1"}], {"rollout-1"}),
        ([ALL - {"rollout-1/1"}, ALL], set()),  # a moment
        ([None, ALL - {"rollout-1/1"}], set()),  # leases run out while Redis is away
        ([set(), {"trainer/0"}, {"trainer/0", "rollout-0/0"}], set()),  # Redis is empty, all take their slots again
        ([ALL - {"trainer/0", "rollout-0/0"}], set()),
    ],
)
async def test_replicas_are_lost(
    seen: list[set[str] | None], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_watch, "INTERVAL_S", 0.001)
    assert await lost(Looks().see(*seen)) == expected


async def test_what_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_watch, "INTERVAL_S", 0.001)
    group = Looks().see(ALL - {"rollout-1/1"})
    watch = SlotWatch(group, TRAINER, REPLICAS, lease_ttl_s=60.0)
    running = asyncio.create_task(watch.run())
    with pytest.raises(NoAnswer, match="rollout-1: rollout-1/1 lost its slot in tandem:test"):
        await asyncio.wait_for(watch.until_lost("rollout-1"), 10.0)
    await cancel(running)
