"""The trainer's egress is one model, whatever the number of replicas: bytes counted on every rank's own wire."""

from collections.abc import Callable

import pytest
import torch

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import Fleet
from tests.kit.stores import same
from weightsync.layouts.layout import Parallel
from weightsync.transfer.communicators.communicator import Communicator, Pending
from weightsync.transfer.digest import HEADER_BYTES

pytestmark = pytest.mark.integration


class CountingWire:
    """A communicator that counts what goes out and comes in."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.slots, self.wait = inner.rank, inner.slots, inner.wait
        self.out_bytes = self.in_bytes = self.sends = 0
        self.awaited: set[int] = set()  # sequences of messages, up to the first send

    def send(self, buffer: torch.Tensor, to: int, tag: int, lane: int = 0) -> Pending:
        self.out_bytes += buffer.numel()
        self.sends += 1
        return self._inner.send(buffer, to, tag)

    def receive(self, buffer: torch.Tensor, source: int, tag: int, lane: int = 0) -> Pending:
        self.in_bytes += buffer.numel()
        if self.sends == 0:
            self.awaited.add(tag)
        return self._inner.receive(buffer, source, tag)


def counted_round(them: Fleet, round_: pb.Round) -> dict[str, CountingWire]:
    them.run(pb.ROUND_PHASE_PREPARE, round_)
    wires = {}
    for slot, member in them.members.items():
        transport = member._transfer._prepared.transport  # type: ignore[union-attr]
        wires[slot] = transport._comm = CountingWire(transport._comm)  # type: ignore[union-attr]
    for phase in (pb.ROUND_PHASE_TRANSFER, pb.ROUND_PHASE_VERIFY, pb.ROUND_PHASE_COMMIT):
        for result in them.run(phase, round_).values():
            assert isinstance(result, pb.PhaseReport), result
    return wires


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_rank_sends_at_most_its_own_shard(fleet: Callable[..., Fleet], num_replicas: int, tensor: int) -> None:
    them = fleet(Parallel(tensor=2), {f"rollout-{i}": Parallel(tensor=tensor) for i in range(num_replicas)})
    wires = counted_round(them, them.round(1))
    shard_bytes = [them.members[f"rollout-0/{rank}"]._shard.num_bytes for rank in range(tensor)]
    messages = len(them.members["trainer/0"]._transfer._plan.messages[Parallel(tensor=tensor)])  # type: ignore[union-attr]
    headers = messages * HEADER_BYTES
    assert wires["trainer/0"].out_bytes + wires["trainer/1"].out_bytes == sum(shard_bytes) + headers
    for replica in range(num_replicas):
        mine = [wires[f"rollout-{replica}/{rank}"] for rank in range(tensor)]
        assert sum(wire.in_bytes for wire in mine) == sum(shard_bytes) + headers
        passed_on = 0 if replica == num_replicas - 1 else sum(shard_bytes) + headers
        assert sum(wire.out_bytes for wire in mine) == passed_on
        for rank in range(tensor):
            slot = f"rollout-{replica}/{rank}"
            assert same(them.stores[slot], them.expected(slot)) == []


def test_each_layout_costs_the_trainer_one_model(fleet: Callable[..., Fleet]) -> None:
    """Replicas of TP 1 and of TP 2 have shards of their own: what one kind has is no use to the other."""
    sizes = {"rollout-0": Parallel(), "rollout-1": Parallel(tensor=2), "rollout-2": Parallel(), "rollout-3": Parallel()}
    them = fleet(Parallel(tensor=2), sizes)
    reports = them.sync(them.round(1))
    shards = {slot: report.shard_bytes for slot, report in reports.items()}
    sent = sum(reports[f"trainer/{rank}"].bytes_sent for rank in range(2))
    assert sent == shards["rollout-0/0"] + shards["rollout-1/0"] + shards["rollout-1/1"]
    assert [reports[f"{name}/0"].bytes_sent for name in sizes] == [shards["rollout-0/0"], 0, shards["rollout-0/0"], 0]


def test_a_replica_is_ready_for_the_next_message_before_it_passes_one_on(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), {"rollout-0": Parallel(), "rollout-1": Parallel()})
    wires = counted_round(them, them.round(1))
    # Here every message goes through a buffer, and there are two.
    assert wires["rollout-0/0"].awaited == {0, 1}


class ToldWire:
    """A communicator that writes down what is begun and what is waited for: (what, tag)."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.slots = inner.rank, inner.slots
        self.told: list[tuple[str, int]] = []
        self._tags: dict[int, int] = {}  # by the pending operation, which is kept: its id stays its own
        self._pending: list[Pending] = []

    def send(self, buffer: torch.Tensor, to: int, tag: int, lane: int = 0) -> Pending:
        return self._begin("send", tag, self._inner.send(buffer, to, tag))

    def receive(self, buffer: torch.Tensor, source: int, tag: int, lane: int = 0) -> Pending:
        return self._begin("receive", tag, self._inner.receive(buffer, source, tag))

    def wait(self, pending: Pending, peer: int, timeout_s: float) -> None:
        self.told.append(("wait", self._tags[id(pending)]))
        self._inner.wait(pending, peer, timeout_s)

    def _begin(self, what: str, tag: int, pending: Pending) -> Pending:
        self._pending.append(pending)
        self._tags[id(pending)] = tag
        self.told.append((what, tag))
        return pending

    def first(self, what: str, tag: int) -> int:
        """When it happened first."""
        return self.told.index((what, tag))


def test_the_next_message_is_packed_and_awaited_while_the_last_one_moves(fleet: Callable[..., Fleet]) -> None:
    """Send overlaps pack, receive overlaps unpack: a message is packed right before its bytes are handed over."""
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    them.run(pb.ROUND_PHASE_PREPARE, them.round(1))
    wires = {}
    for slot, member in them.members.items():
        transport = member._transfer._prepared.transport  # type: ignore[union-attr]
        wires[slot] = transport._comm = ToldWire(transport._comm)  # type: ignore[union-attr]
    them.run(pb.ROUND_PHASE_TRANSFER, them.round(1))
    sender, receiver = wires["trainer/0"], wires["rollout-0/0"]
    last = max(tag for _, tag in sender.told)
    assert last > 3
    for tag in range(last):
        assert sender.first("send", tag + 1) < sender.first("wait", tag)
        assert receiver.first("receive", tag + 1) < receiver.first("wait", tag)
    # A sender has two under way, and no more.
    assert all(sender.first("wait", tag) < sender.first("send", tag + 2) for tag in range(last - 1))


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_shared_memory_puts_no_payload_on_the_wire(fleet: Callable[..., Fleet], num_replicas: int) -> None:
    them = fleet(Parallel(tensor=2), {f"rollout-{i}": Parallel() for i in range(num_replicas)})
    wires = counted_round(them, them.round(1, transport=pb.SYNC_TRANSPORT_COLOCATED))
    for slot, wire in wires.items():
        if slot.startswith("trainer"):  # a byte to each reader, then headers
            messages = len(them.members[slot]._transfer._plan.messages[Parallel()]) // 2  # type: ignore[union-attr]
            assert wire.out_bytes == num_replicas * (1 + messages * HEADER_BYTES)
        else:  # a byte to each trainer rank
            assert wire.out_bytes == wire.sends == 2
