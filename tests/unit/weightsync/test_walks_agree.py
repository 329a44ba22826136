"""A simulated rank does what a real one does: the same operations on the same messages, in the same order."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.stores import tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.plans.cost import MessageSizes, Speeds
from weightsync.plans.messages import Message
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan, plan_round
from weightsync.simulate.clock import Clock, Machine, SimulatedLink
from weightsync.simulate.ranks import MessageInFlight, Rank, RankTraffic, Walk, Weights, steps_of
from weightsync.transfer.digest import HEADER_BYTES
from weightsync.transfer.transports import collective
from weightsync.transfer.transports.collective import Buffers
from weightsync.transfer.transports.packing import Packer
from weightsync.transfer.transports.transport import TransferJob

# What one rank does, in order: begins to send or to receive, has sent, has received; the message; the other rank.
Deeds = list[tuple[str, int, int]]
DIGEST = bytes(16)


class NoDigest:
    """In place of PayloadDigest: contents are not what is compared."""

    def update(self, part: object) -> None:
        """Nothing."""

    def digest(self) -> bytes:
        """Of everything."""
        return DIGEST


class FakeJob(TransferJob):
    """Whose headers say nothing."""

    def header(self, message: Message, digest: bytes) -> torch.Tensor:
        return torch.zeros(HEADER_BYTES, dtype=torch.uint8)

    def digest_in(self, head: torch.Tensor, message: Message) -> bytes:
        return DIGEST


@dataclass
class FakeCommunicator:
    """Everything arrives at once; what was asked of it is noted, each message once."""

    rank: int
    slots: Sequence[str]
    deeds: Deeds = field(default_factory=list)

    def send(self, part: torch.Tensor, receiver: int, tag: int, lane: int = 0) -> tuple[str, int, int]:
        return self._note("send", tag, receiver, "sent")

    def receive(self, part: torch.Tensor, sender: int, tag: int, lane: int = 0) -> tuple[str, int, int]:
        return self._note("receive", tag, sender, "received")

    def _note(self, deed: str, sequence: int, peer: int, done: str) -> tuple[str, int, int]:
        if (deed, sequence, peer) not in self.deeds:
            self.deeds.append((deed, sequence, peer))
        return done, sequence, peer


class NotedWaits:
    """In place of Waits: notes for which message was waited, once."""

    def __init__(self, communicator: FakeCommunicator, job: object) -> None:
        self._deeds = communicator.deeds

    def wait(self, pending: tuple[str, int, int], peer: int) -> None:
        if pending not in self._deeds:
            self._deeds.append(pending)


def real_deeds(plan: RoundPlan, participants: Participants, rank: int, rollout: Parallel) -> Deeds:
    """Of the transport's walk on one rank, over memory of its layout."""
    transfer = plan.plans[rollout]
    sends = rank < participants.trainer.world_size
    layout = transfer.source if sends else transfer.target
    own = rank if sends else (rank - participants.trainer.world_size) % rollout.world_size
    tensors = {name: torch.zeros(shape) for name, shape in layout.parameters_of(own).items()}
    job = FakeJob(
        model="",
        round_id="r",
        plan=plan,
        participants=participants,
        packer=Packer(layout, tensors, "src" if sends else "dst"),
        policy_version=1,
        bucket_bytes=0,
        deadline=time.monotonic() + 60,
        timeout_s=60,
    )
    noted = FakeCommunicator(rank, participants.slots)
    communicator: Any = noted
    collective._Walk(communicator, job, plan.hops_of(rank, participants), Buffers(torch.device("cpu"))).run()
    return noted.deeds


@dataclass(eq=False)
class NotedWalk(Walk):
    """The simulation's walk, with what each rank does noted."""

    deeds: dict[int, Deeds] = field(default_factory=lambda: defaultdict(list))
    now: int = -1
    # The other end of each rank's messages under way; the messages are kept, so that no two have one id.
    peers: dict[tuple[int, int], int] = field(default_factory=dict)
    kept: list[MessageInFlight] = field(default_factory=list)

    def note(self, deed: str, index: int, peer: int) -> None:
        self.deeds[self.now].append((deed, index, peer))

    def _continue(self, rank: int, process: "Iterator[float | MessageInFlight]") -> None:
        before, self.now = self.now, rank
        super()._continue(rank, process)
        self.now = before

    def _ready(self, index: int, sender: int, receiver: int) -> MessageInFlight:
        sends = self.now == sender
        self.note("send" if sends else "receive", index, receiver if sends else sender)
        flight = super()._ready(index, sender, receiver)
        self.peers[self.now, id(flight)] = receiver if sends else sender
        self.kept.append(flight)
        return flight

    def _finish_send(self, traffic: RankTraffic) -> "Iterator[float | MessageInFlight]":
        flight, _ = traffic.outgoing[0]
        self.note("sent", flight.index, self.peers[self.now, id(flight)])
        yield from super()._finish_send(traffic)

    def _accept(self, rank: int, flight: MessageInFlight, *others: Any) -> "Iterator[float | MessageInFlight]":
        self.note("received", flight.index, self.peers[rank, id(flight)])
        yield from super()._accept(rank, flight, *others)


def simulated_deeds(plan: RoundPlan, participants: Participants, rollout: Parallel) -> dict[int, Deeds]:
    """By rank."""
    transfer, messages = plan.plans[rollout], plan.messages[rollout]
    clock, speeds = Clock(), Speeds()
    sizes = MessageSizes.of(transfer, messages, 4, "cpu")
    ranks = [Rank(out=SimulatedLink(1e9), into=SimulatedLink(1e9)) for _ in participants.slots]
    walk = NotedWalk(
        clock=clock, machine=Machine(clock, None), speeds=speeds, ranks=ranks, weights=Weights.of(sizes, speeds)
    )
    replicas = len(participants.replicas)
    steps = steps_of(messages, participants.trainer.world_size, rollout.world_size, replicas)
    for rank, each in enumerate(steps):
        walk.start(rank, each)
    clock.run()
    return dict(walk.deeds)


@pytest.fixture(autouse=True)
def _nothing_is_hashed_or_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "PayloadDigest", NoDigest)
    monkeypatch.setattr(collective, "Waits", NotedWaits)


@settings(max_examples=25, deadline=None)
@given(
    trainer=st.sampled_from([Parallel(), Parallel(tensor=2), Parallel(pipeline=2), Parallel(tensor=2, data=2)]),
    rollout=st.sampled_from([Parallel(), Parallel(tensor=2)]),
    replicas=st.integers(1, 4),
    max_elements=st.sampled_from([50, 200, 1000, 100_000]),
    wide=st.booleans(),
)
def test_a_simulated_rank_does_what_a_real_one_does(
    trainer: Parallel, rollout: Parallel, replicas: int, max_elements: int, wide: bool
) -> None:
    """wide: parameters with rows that go from memory to memory, and so without buffers."""
    spec = tiny_spec(hidden_size=512, intermediate_size=256, num_hidden_layers=2) if wide else tiny_spec()
    plan = plan_round(spec, trainer, (rollout,), max_elements * (200 if wide else 1))
    specs = [pb.ReplicaSpec(name=f"rollout-{i}", parallel=rollout.to_proto()) for i in range(replicas)]
    participants = Participants.of_round(pb.Round(trainer=trainer.to_proto(), replicas=specs))
    simulated = simulated_deeds(plan, participants, rollout)
    for rank in range(len(participants.slots)):
        assert simulated.get(rank, []) == real_deeds(plan, participants, rank, rollout), participants.slots[rank]
