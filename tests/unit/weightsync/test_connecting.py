"""Ranks connect in PREPARE: those that the plan pairs, in an order that cannot deadlock; who is missing is named."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from servicekit.errors import PeerLost
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.stores import tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.plans.messages import Hop, Link, links_of
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan, plan_round
from weightsync.round import deadlines
from weightsync.transfer.communicators import communicator as communicators
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.transports.collective import CollectiveTransport

SPEC = tiny_spec(num_key_value_heads=4)
DEVICE = torch.device("meta")  # what is not on the CPU goes over lanes
LANES = 2


class Done:
    """An operation that is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *_: Any) -> bool:
        return True


class Under:
    """One that is not."""

    def wait(self, *_: Any) -> bool:
        raise RuntimeError("Timed out")


class Gloo:
    """Connections that stand."""

    def recv(self, *_: Any) -> Under:
        return Under()


class Fabric:
    """Where the lanes of all ranks meet. As in NCCL, a call waits until the other end has made its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._come: dict[tuple[int, int, int], set[str]] = {}
        self.met: list[tuple[int, int, int]] = []
        self.released = False

    def release(self) -> None:
        """Ends all waits."""
        with self._changed:
            self.released = True
            self._changed.notify_all()

    def meet(self, lane: int, sender: int, receiver: int, end: str) -> Done:
        key = (lane, sender, receiver)
        with self._changed:
            ends = self._come.setdefault(key, set())
            assert end not in ends, f"{key} meets twice"
            ends.add(end)
            if len(ends) == 2:
                self.met.append(key)
                self._changed.notify_all()
            self._changed.wait_for(lambda: len(ends) == 2 or self.released)
        return Done()


class Lane:
    """An NCCL group of one rank."""

    def __init__(self, fabric: Fabric, lane: int, rank: int) -> None:
        self._fabric, self._lane, self._rank = fabric, lane, rank
        self.aborted = threading.Event()

    def send(self, _: Any, to: int, __: int) -> Done:
        return self._fabric.meet(self._lane, self._rank, to, "sender")

    def recv(self, _: Any, source: int, __: int) -> Done:
        return self._fabric.meet(self._lane, source, self._rank, "receiver")

    def abort(self) -> None:
        """As NCCL may: it waits for the call that another thread is in."""
        self.aborted.set()
        with self._fabric._changed:
            self._fabric._changed.wait_for(lambda: self._fabric.released)


class Ranks:
    """The ranks of a round, on GPUs that are not there."""

    def __init__(self, trainer: Parallel, replicas: dict[str, Parallel]) -> None:
        self.participants = Participants.of_round(
            pb.Round(
                trainer=trainer.to_proto(),
                replicas=[pb.ReplicaSpec(name=name, parallel=p.to_proto()) for name, p in replicas.items()],
            )
        )
        self.plan: RoundPlan = plan_round(SPEC, trainer, tuple(self.participants.chains()), 64)
        self.fabric = Fabric()
        self.slots = self.participants.slots
        self.lanes = [[Lane(self.fabric, lane, rank) for lane in range(LANES)] for rank in range(len(self.slots))]
        self.communicators = [self._communicator(rank) for rank in range(len(self.slots))]
        self.transports = [CollectiveTransport(each, torch.device("cpu")) for each in self.communicators]

    def _communicator(self, rank: int) -> Communicator:
        group: Any = Gloo()
        lanes: Any = self.lanes[rank]
        return Communicator(group, rank=rank, slots=self.slots, store=group, device=DEVICE, lanes=lanes)

    @property
    def hops(self) -> list[Hop]:
        """Of all ranks."""
        ranks = range(len(self.slots))
        return [hop for rank in ranks for hop in self.plan.hops_of(rank, self.participants)]

    def connect(self, missing: tuple[str, ...] = (), timeout_s: float = 5.0) -> dict[str, Exception | None]:
        """What comes of it on each rank that is there."""
        deadline = time.monotonic() + timeout_s
        with ThreadPoolExecutor(len(self.slots)) as pool:
            futures: dict[str, Future[None]] = {
                slot: pool.submit(transport.connect, self.plan, self.participants, deadline)
                for slot, transport in zip(self.slots, self.transports, strict=True)
                if slot not in missing
            }
            try:
                return {slot: future.exception(timeout_s + 10) for slot, future in futures.items()}  # type: ignore[misc]
            finally:
                if not all(future.done() for future in futures.values()):
                    self.fabric.release()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Trainer TP4 x DP2, a chain of three replicas TP4 and another layout beside it: 21 ranks."""
    replicas = {f"rollout-{i}": Parallel(tensor=4) for i in range(3)} | {"odd": Parallel()}
    them = Ranks(Parallel(tensor=4, data=2), replicas)
    yield them
    them.fabric.release()


def test_the_pairs_of_the_plan_meet_and_no_others(ranks: Ranks) -> None:
    assert set(ranks.connect().values()) == {None}
    assert sorted(ranks.fabric.met) == sorted({(hop.hop % LANES, hop.sender, hop.receiver) for hop in ranks.hops})


def test_they_meet_once(ranks: Ranks) -> None:
    """In the next round, and also where another transport came between."""
    ranks.connect()
    met = list(ranks.fabric.met)
    assert set(ranks.connect().values()) == {None}
    ranks.transports = [CollectiveTransport(each, torch.device("cpu")) for each in ranks.communicators]
    assert set(ranks.connect().values()) == {None}
    assert ranks.fabric.met == met


def test_who_does_not_come_is_named_and_nobody_is_wedged(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's wait for a peer has no deadline and its abort none either: both are left behind."""
    monkeypatch.setattr(deadlines, "WATCH_MARGIN_S", 0.1)
    monkeypatch.setattr(communicators, "LANE_ABORT_S", 0.1)
    began = time.monotonic()
    found = ranks.connect(missing=("rollout-1/2",), timeout_s=0.5)
    assert time.monotonic() - began < 5
    for slot in ("rollout-0/2", "rollout-2/2"):
        assert isinstance(found[slot], PeerLost)
    assert "rollout-0/2 and rollout-1/2 did not connect in time" in str(found["rollout-0/2"])
    for slot, error in found.items():
        closed = ranks.communicators[ranks.slots.index(slot)].closed
        assert bool(error) == bool(closed)
    assert all(lane.aborted.is_set() for lane in ranks.lanes[ranks.slots.index("rollout-0/2")])


def walked_by(links: list[Link], rank: int) -> list[Link]:
    return [link for link in links if rank in (link.sender, link.receiver)]


def test_the_order_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    whole = links_of(ranks.hops, len(ranks.slots))
    for rank in range(len(ranks.slots)):
        own = links_of(ranks.plan.hops_of(rank, ranks.participants), len(ranks.slots))
        assert own == walked_by(whole, rank)


def turns(links: list[Link]) -> int:
    """Turns until all have met, where each rank meets one other in a turn."""
    free: dict[int, int] = {}
    for link in links:
        free[link.sender] = free[link.receiver] = max(free.get(link.sender, 0), free.get(link.receiver, 0)) + 1
    return max(free.values())


def test_most_links_are_walked_at_the_same_time() -> None:
    """The busiest rank sets the pace: a long chain costs two turns, not one per replica."""
    chain = Ranks(Parallel(), {f"rollout-{i}": Parallel() for i in range(32)})
    assert turns(links_of(chain.hops, len(chain.slots))) == 2
    wide = Ranks(Parallel(tensor=4, pipeline=2, data=2), {"rollout-0": Parallel(tensor=4)})
    links = links_of(wide.hops, len(wide.slots))
    busiest = max(len(walked_by(links, rank)) for rank in range(len(wide.slots)))
    assert turns(links) <= 2 * busiest
