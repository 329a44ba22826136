"""Simulated ranks: each does the steps of `plans/walk.py`, as the transport `collective` does."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from weightsync.plans.cost import MessageSizes, Speeds
from weightsync.plans.limits import number_of_buffers
from weightsync.plans.messages import Hop, Message, route
from weightsync.plans.walk import Step, walk
from weightsync.simulate.clock import Clock, Machine, SimulatedLink


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


def hops_by_rank(messages: Sequence[Message], trainer_ranks: int, replica_ranks: int, replicas: int) -> list[list[Hop]]:
    """List the hops of each rank, [ranks], in order; the trainer's ranks come first."""
    firsts = [trainer_ranks + replica * replica_ranks for replica in range(replicas)]
    by_rank: list[list[Hop]] = [[] for _ in range(trainer_ranks + replicas * replica_ranks)]
    for hop in route(messages, trainer_ranks, firsts):
        by_rank[hop.sender].append(hop)
        by_rank[hop.receiver].append(hop)
    return by_rank


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

    def start(self, rank: int, hops: Sequence[Hop]) -> None:
        """Start a rank now."""
        self._continue(rank, self._process(rank, hops))

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

    def _process(self, rank: int, hops: Sequence[Hop]) -> "Iterator[float | MessageInFlight]":
        """Do the steps of one rank; yield the computations and messages that it waits for."""
        weights = self.weights
        size, largest = (
            max((column[hop.message.sequence] for hop in hops), default=0)
            for column in (weights.staged_dst, weights.num_bytes)
        )
        mine: dict[tuple[int, int], MessageInFlight] = {}  # as `flights`
        buffers = number_of_buffers(size, largest)
        for step, hop in walk(rank, hops, buffers, lambda message: weights.staged_dst[message.sequence] > 0):
            index, key = hop.message.sequence, (hop.message.sequence, hop.receiver)
            match step:
                case Step.SEND:
                    yield weights.pack_s[index]
                    mine[key] = self._ready(hop)
                    yield weights.digest_s[index]
                    self._sign(rank, mine[key])
                case Step.RELAY:
                    yield weights.relay_s[index]
                    mine[key] = self._ready(hop)
                    self._sign(rank, mine[key])
                case Step.RECEIVE:
                    mine[key] = self._ready(hop)
                case Step.SENT | Step.RECEIVED:
                    yield mine.pop(key)
                case Step.VERIFIED:
                    yield mine.pop(key)
                    yield weights.digest_s[index]
                case Step.UNPACK:
                    yield weights.unpack_s[index]
                    self.ranks[rank].received_bytes += weights.num_bytes[index]

    def _sign(self, rank: int, flight: MessageInFlight) -> None:
        """Note that the sender has finished its part."""
        flight.signed = True
        self._deliver(flight)
        self.ranks[rank].sent_bytes += self.weights.num_bytes[flight.index]

    def _ready(self, hop: Hop) -> MessageInFlight:
        """Note that one end is ready; the second one starts the transfer."""
        index, sender, receiver = hop.message.sequence, hop.sender, hop.receiver
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
