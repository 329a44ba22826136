"""Simulated ranks: each processes its messages as `transports/collective.py` does, several in flight, in total order.

tests/unit/weightsync/test_walks_agree.py checks, for random plans, that both do the same operations.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from weightsync.plans.cost import MessageSizes, Speeds
from weightsync.plans.limits import RECEIVES, SENDS, number_of_buffers
from weightsync.plans.messages import Message
from weightsync.simulate.clock import Clock, Machine, SimulatedLink

Step = tuple[Literal["send", "relay", "receive"], int, int]  # what, index of the message, rank of the other end


@dataclass(eq=False, slots=True)
class MessageInFlight:
    """A message between two ranks: it moves when both ends are ready, and lands when its header has arrived too."""

    index: int  # of the message
    ends_ready: int = 0
    arrived: bool = False
    signed: bool = False  # the sender has sent the digest with the header
    delivered: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Rank:
    """A rank's links, speed (1.0: that of `Speeds`) and results."""

    out: SimulatedLink
    into: SimulatedLink
    speed: float = 1.0
    sent_bytes: int = 0
    received_bytes: int = 0
    finished_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Per message: bytes of the payload, bytes that the receiver buffers, and core seconds of both ends."""

    num_bytes: list[int]
    staged_dst: list[int]
    pack_s: list[float]
    digest_s: list[float]
    unpack_s: list[float]
    relay_s: list[float]

    @classmethod
    def of(cls, sizes: MessageSizes, speeds: Speeds) -> "Weights":
        """Convert the columns to lists, which are faster to read one by one."""
        return cls(
            num_bytes=sizes.num_bytes.tolist(),
            staged_dst=sizes.staged_dst.tolist(),
            **{name: getattr(sizes, name)(speeds).tolist() for name in ("pack_s", "digest_s", "unpack_s", "relay_s")},
        )


def steps_of(messages: Sequence[Message], trainer_ranks: int, replica_ranks: int, replicas: int) -> list[list[Step]]:
    """List the steps of each rank, [ranks], in the order of `messages.route`; the trainer's ranks come first."""
    steps: list[list[Step]] = [[] for _ in range(trainer_ranks + replicas * replica_ranks)]
    for index, message in enumerate(messages):
        sender, what = message.src, "send"
        for replica in range(replicas):
            receiver = trainer_ranks + replica * replica_ranks + message.dst
            steps[sender].append((what, index, receiver))  # type: ignore[arg-type]
            steps[receiver].append(("receive", index, sender))
            sender, what = receiver, "relay"
    return steps


@dataclass(eq=False)
class RankTraffic:
    """A rank's messages in flight.

    Attributes:
        outgoing: with the number of buffers that are free again when the message has delivered.
    """

    free_buffers: int
    outgoing: deque[tuple[MessageInFlight, int]] = field(default_factory=deque)
    incoming: deque[MessageInFlight] = field(default_factory=deque)


@dataclass(eq=False)
class Walk:
    """Runs all ranks through their steps."""

    clock: Clock
    machine: Machine
    speeds: Speeds
    ranks: list[Rank]
    weights: Weights
    flights: dict[tuple[int, int], MessageInFlight] = field(default_factory=dict)  # by message and receiver
    lines: dict[tuple[int, int], deque[MessageInFlight]] = field(default_factory=dict)  # by sender and receiver

    def start(self, rank: int, steps: Sequence[Step]) -> None:
        """Start a rank now."""
        self._continue(rank, self._steps(rank, steps))

    def _continue(self, rank: int, process: "Iterator[float | MessageInFlight]") -> None:
        """Run a rank until it must wait, or has finished."""
        for wait in process:
            if isinstance(wait, MessageInFlight):
                if wait.delivered:
                    continue
                wait.waiters.append(partial(self._continue, rank, process))
            else:
                self.machine.compute(wait, partial(self._continue, rank, process), self.ranks[rank].speed)
            return
        self.ranks[rank].finished_s = self.clock.now

    def _steps(self, rank: int, steps: Sequence[Step]) -> "Iterator[float | MessageInFlight]":
        """Do what Transfer.run does on one rank; yield the computations and messages that it waits for."""
        traffic = RankTraffic(self._num_buffers([index for _, index, _ in steps]))
        for what, index, peer in steps:
            if what == "send":
                yield from self._send(rank, index, peer, traffic)
        relays = {index: peer for what, index, peer in steps if what == "relay"}
        to_receive = deque((index, peer) for what, index, peer in steps if what == "receive")
        while to_receive or traffic.incoming:
            yield from self._receive_ahead(rank, to_receive, traffic)
            yield from self._accept(rank, traffic.incoming.popleft(), relays, traffic)
        while traffic.outgoing:
            yield from self._finish_send(traffic)

    def _num_buffers(self, indices: Sequence[int]) -> int:
        weights = self.weights
        size = max((weights.staged_dst[index] for index in indices), default=0)
        return number_of_buffers(size, max((weights.num_bytes[index] for index in indices), default=0))

    def _send(self, rank: int, index: int, peer: int, traffic: RankTraffic) -> "Iterator[float | MessageInFlight]":
        yield from self._make_room(traffic)
        yield self.weights.pack_s[index]
        flight = self._ready(index, rank, peer)
        traffic.outgoing.append((flight, 0))
        yield self.weights.digest_s[index]
        self._sign(rank, flight)

    def _relay(self, rank: int, index: int, peer: int, traffic: RankTraffic) -> "Iterator[float | MessageInFlight]":
        yield from self._make_room(traffic)
        yield self.weights.relay_s[index]
        flight = self._ready(index, rank, peer)
        traffic.outgoing.append((flight, self._buffers(index)))
        self._sign(rank, flight)

    def _make_room(self, traffic: RankTraffic) -> "Iterator[float | MessageInFlight]":
        while len(traffic.outgoing) >= SENDS:
            yield from self._finish_send(traffic)

    def _finish_send(self, traffic: RankTraffic) -> "Iterator[float | MessageInFlight]":
        flight, buffers = traffic.outgoing.popleft()
        yield flight
        traffic.free_buffers += buffers

    def _receive_ahead(
        self, rank: int, to_receive: deque[tuple[int, int]], traffic: RankTraffic
    ) -> "Iterator[float | MessageInFlight]":
        while to_receive and len(traffic.incoming) < RECEIVES:
            index, peer = to_receive[0]
            while traffic.free_buffers < self._buffers(index):
                if traffic.incoming:
                    return
                yield from self._finish_send(traffic)
            to_receive.popleft()
            traffic.free_buffers -= self._buffers(index)
            traffic.incoming.append(self._ready(index, peer, rank))

    def _accept(
        self, rank: int, flight: MessageInFlight, relays: dict[int, int], traffic: RankTraffic
    ) -> "Iterator[float | MessageInFlight]":
        yield flight
        index = flight.index
        if index in relays:  # a relay verifies before it forwards
            yield self.weights.digest_s[index]
            yield from self._relay(rank, index, relays[index], traffic)
        yield self.weights.unpack_s[index]
        self.ranks[rank].received_bytes += self.weights.num_bytes[index]
        if index not in relays:
            traffic.free_buffers += self._buffers(index)

    def _buffers(self, index: int) -> int:
        return int(self.weights.staged_dst[index] > 0)

    def _sign(self, rank: int, flight: MessageInFlight) -> None:
        """Note that the sender has finished its part."""
        flight.signed = True
        self._deliver(flight)
        self.ranks[rank].sent_bytes += self.weights.num_bytes[flight.index]

    def _ready(self, index: int, sender: int, receiver: int) -> MessageInFlight:
        """Note that one end is ready; the second one starts the transfer."""
        flight = self.flights.setdefault((index, receiver), MessageInFlight(index))
        flight.ends_ready += 1
        if flight.ends_ready == 2:
            del self.flights[index, receiver]
            self.clock.after(self.speeds.latency_s, lambda: self._enqueue(flight, sender, receiver))
        return flight

    def _enqueue(self, flight: MessageInFlight, sender: int, receiver: int) -> None:
        """Send a message after the earlier ones of the same sender to the same receiver."""
        line = self.lines.setdefault((sender, receiver), deque())
        line.append(flight)
        if len(line) == 1:
            self._transmit(flight, sender, receiver)

    def _transmit(self, flight: MessageInFlight, sender: int, receiver: int) -> None:
        self.machine.send(
            self.weights.num_bytes[flight.index],
            self.ranks[sender].out,
            self.ranks[receiver].into,
            self.speeds.link_cores / self.speeds.trainer_link,
            partial(self._arrive, flight, sender, receiver),
        )

    def _arrive(self, flight: MessageInFlight, sender: int, receiver: int) -> None:
        flight.arrived = True
        line = self.lines[sender, receiver]
        line.popleft()
        if line:
            self._transmit(line[0], sender, receiver)
        else:
            del self.lines[sender, receiver]
        self._deliver(flight)

    def _deliver(self, flight: MessageInFlight) -> None:
        """Wake both ends when payload and header have arrived."""
        if not (flight.arrived and flight.signed):
            return
        flight.delivered = True
        for waiter in flight.waiters:
            waiter()
