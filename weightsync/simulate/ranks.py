"""Simulated ranks: each walks its messages as `transports/collective.py` does, several under way, in total order.

tests/unit/weightsync/test_walks_agree.py holds both walks to the same operations, for random plans.
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
    """A message between two ranks. It moves when both ends are ready; it has landed when its header has come, too."""

    index: int  # of the message
    ends_ready: int = 0
    arrived: bool = False
    signed: bool = False  # the sender's digest is done, and the header with it
    landed: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Rank:
    """A rank's links, speed (1.0: as `Speeds` says) and results."""

    out: SimulatedLink
    into: SimulatedLink
    speed: float = 1.0
    sent_bytes: int = 0
    received_bytes: int = 0
    finished_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """[messages] bytes of the payload, and of what the receiver has buffers for; core time of both ends in seconds."""

    num_bytes: list[int]
    staged_dst: list[int]
    pack_s: list[float]
    digest_s: list[float]
    unpack_s: list[float]
    relay_s: list[float]

    @classmethod
    def of(cls, sizes: MessageSizes, speeds: Speeds) -> "Weights":
        """Lists, because a simulation reads them one by one."""
        return cls(
            num_bytes=sizes.num_bytes.tolist(),
            staged_dst=sizes.staged_dst.tolist(),
            **{name: getattr(sizes, name)(speeds).tolist() for name in ("pack_s", "digest_s", "unpack_s", "relay_s")},
        )


def steps_of(messages: Sequence[Message], trainer_ranks: int, replica_ranks: int, replicas: int) -> list[list[Step]]:
    """[ranks] what each rank does, in the order of `messages.route`; the trainer's ranks come first."""
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
class UnderWay:
    """A rank's messages under way. outgoing: with the buffers that are free again once it has landed."""

    free_buffers: int
    outgoing: deque[tuple[MessageInFlight, int]] = field(default_factory=deque)
    incoming: deque[MessageInFlight] = field(default_factory=deque)


@dataclass(eq=False)
class Walk:
    """All ranks on their way through their steps."""

    clock: Clock
    machine: Machine
    speeds: Speeds
    ranks: list[Rank]
    weights: Weights
    flights: dict[tuple[int, int], MessageInFlight] = field(default_factory=dict)  # by message and receiver
    lines: dict[tuple[int, int], deque[MessageInFlight]] = field(default_factory=dict)  # by sender and receiver

    def start(self, rank: int, steps: Sequence[Step]) -> None:
        """Lets a rank begin now."""
        self._go_on(rank, self._steps(rank, steps))

    def _go_on(self, rank: int, process: "Iterator[float | MessageInFlight]") -> None:
        """Runs a rank until it must wait, or has finished."""
        for wait in process:
            if isinstance(wait, MessageInFlight):
                if wait.landed:
                    continue
                wait.waiters.append(partial(self._go_on, rank, process))
            else:
                self.machine.compute(wait, partial(self._go_on, rank, process), self.ranks[rank].speed)
            return
        self.ranks[rank].finished_s = self.clock.now

    def _steps(self, rank: int, steps: Sequence[Step]) -> "Iterator[float | MessageInFlight]":
        """Transfer.run of one rank: yields what it waits for."""
        under_way = UnderWay(self._num_buffers([index for _, index, _ in steps]))
        for what, index, peer in steps:
            if what == "send":
                yield from self._send(rank, index, peer, under_way)
        relays = {index: peer for what, index, peer in steps if what == "relay"}
        to_receive = deque((index, peer) for what, index, peer in steps if what == "receive")
        while to_receive or under_way.incoming:
            yield from self._receive_ahead(rank, to_receive, under_way)
            yield from self._accept(rank, under_way.incoming.popleft(), relays, under_way)
        while under_way.outgoing:
            yield from self._finish_send(under_way)

    def _num_buffers(self, indices: Sequence[int]) -> int:
        weights = self.weights
        size = max((weights.staged_dst[index] for index in indices), default=0)
        return number_of_buffers(size, max((weights.num_bytes[index] for index in indices), default=0))

    def _send(self, rank: int, index: int, peer: int, under_way: UnderWay) -> "Iterator[float | MessageInFlight]":
        yield from self._make_room(under_way)
        yield self.weights.pack_s[index]
        flight = self._ready(index, rank, peer)
        under_way.outgoing.append((flight, 0))
        yield self.weights.digest_s[index]
        self._sign(rank, flight)

    def _relay(self, rank: int, index: int, peer: int, under_way: UnderWay) -> "Iterator[float | MessageInFlight]":
        yield from self._make_room(under_way)
        yield self.weights.relay_s[index]
        flight = self._ready(index, rank, peer)
        under_way.outgoing.append((flight, self._buffers(index)))
        self._sign(rank, flight)

    def _make_room(self, under_way: UnderWay) -> "Iterator[float | MessageInFlight]":
        while len(under_way.outgoing) >= SENDS:
            yield from self._finish_send(under_way)

    def _finish_send(self, under_way: UnderWay) -> "Iterator[float | MessageInFlight]":
        flight, buffers = under_way.outgoing.popleft()
        yield flight
        under_way.free_buffers += buffers

    def _receive_ahead(
        self, rank: int, to_receive: deque[tuple[int, int]], under_way: UnderWay
    ) -> "Iterator[float | MessageInFlight]":
        while to_receive and len(under_way.incoming) < RECEIVES:
            index, peer = to_receive[0]
            while under_way.free_buffers < self._buffers(index):
                if under_way.incoming:
                    return
                yield from self._finish_send(under_way)
            to_receive.popleft()
            under_way.free_buffers -= self._buffers(index)
            under_way.incoming.append(self._ready(index, peer, rank))

    def _accept(
        self, rank: int, flight: MessageInFlight, relays: dict[int, int], under_way: UnderWay
    ) -> "Iterator[float | MessageInFlight]":
        yield flight
        index = flight.index
        if index in relays:  # what is not verified is no source
            yield self.weights.digest_s[index]
            yield from self._relay(rank, index, relays[index], under_way)
        yield self.weights.unpack_s[index]
        self.ranks[rank].received_bytes += self.weights.num_bytes[index]
        if index not in relays:
            under_way.free_buffers += self._buffers(index)

    def _buffers(self, index: int) -> int:
        return int(self.weights.staged_dst[index] > 0)

    def _sign(self, rank: int, flight: MessageInFlight) -> None:
        """The sender's part is done."""
        flight.signed = True
        self._land(flight)
        self.ranks[rank].sent_bytes += self.weights.num_bytes[flight.index]

    def _ready(self, index: int, sender: int, receiver: int) -> MessageInFlight:
        """One end is ready; the second one starts the flight."""
        flight = self.flights.setdefault((index, receiver), MessageInFlight(index))
        flight.ends_ready += 1
        if flight.ends_ready == 2:
            del self.flights[index, receiver]
            self.clock.after(self.speeds.latency_s, lambda: self._take_off(flight, sender, receiver))
        return flight

    def _take_off(self, flight: MessageInFlight, sender: int, receiver: int) -> None:
        """The messages of one sender to one receiver go one after the other."""
        line = self.lines.setdefault((sender, receiver), deque())
        line.append(flight)
        if len(line) == 1:
            self._fly(flight, sender, receiver)

    def _fly(self, flight: MessageInFlight, sender: int, receiver: int) -> None:
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
            self._fly(line[0], sender, receiver)
        else:
            del self.lines[sender, receiver]
        self._land(flight)

    def _land(self, flight: MessageInFlight) -> None:
        """Tells both ends, once payload and header are there."""
        if not (flight.arrived and flight.signed):
            return
        flight.landed = True
        for go_on in flight.waiters:
            go_on()
