"""Simulated ranks: each walks its messages as `transports/collective.py` does, two in flight, in the total order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from weightsync.cost import WINDOW, MessageSizes, Speeds
from weightsync.messages import Message
from weightsync.simulate_clock import Clock, Link, Machine

Step = tuple[Literal["send", "relay", "receive"], int, int]  # what, index of the message, rank of the other end


@dataclass(eq=False, slots=True)
class Flight:
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

    out: Link
    into: Link
    speed: float = 1.0
    passes_on: bool = False  # to another replica
    sent_bytes: int = 0
    received_bytes: int = 0
    finished_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """[messages] payload bytes, and the core time of a message's ends in seconds."""

    num_bytes: list[int]
    pack_s: list[float]
    digest_s: list[float]
    unpack_s: list[float]
    relay_s: list[float]

    @classmethod
    def of(cls, sizes: MessageSizes, speeds: Speeds) -> "Weights":
        """Lists, because a simulation reads them one by one."""
        return cls(
            num_bytes=sizes.num_bytes.tolist(),
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
class Walk:
    """All ranks on their way through their steps."""

    clock: Clock
    machine: Machine
    speeds: Speeds
    ranks: list[Rank]
    weights: Weights
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)  # by message and receiver
    lines: dict[tuple[int, int], deque[Flight]] = field(default_factory=dict)  # by sender and receiver

    def start(self, rank: int, steps: Sequence[Step]) -> None:
        """Lets a rank begin now."""
        self._go_on(rank, self._steps(rank, steps))

    def _go_on(self, rank: int, process: "Iterator[float | Flight]") -> None:
        """Runs a rank until it must wait, or has finished."""
        for wait in process:
            if isinstance(wait, Flight):
                if wait.landed:
                    continue
                wait.waiters.append(partial(self._go_on, rank, process))
            else:
                self.machine.compute(wait, partial(self._go_on, rank, process), self.ranks[rank].speed)
            return
        self.ranks[rank].finished_s = self.clock.now

    def _steps(self, rank: int, steps: Sequence[Step]) -> "Iterator[float | Flight]":
        """Transfer.run of one rank: yields what it waits for."""
        in_flight: deque[tuple[Flight, bool]] = deque()
        held: set[int] = set()
        weights = self.weights
        for what, index, peer in steps:
            while len(in_flight) >= WINDOW:
                yield from self._finish_oldest(in_flight, held, rank)
            if what == "receive":
                in_flight.append((self._ready(index, peer, rank), True))
                continue
            if what == "relay":
                while index not in held:
                    yield from self._finish_oldest(in_flight, held, rank)
                held.discard(index)
            yield weights.pack_s[index] if what == "send" else weights.relay_s[index]
            flight = self._ready(index, rank, peer)
            in_flight.append((flight, False))
            if what == "send":
                yield weights.digest_s[index]
            flight.signed = True
            self._land(flight)
            self.ranks[rank].sent_bytes += weights.num_bytes[index]
        while in_flight:
            yield from self._finish_oldest(in_flight, held, rank)

    def _finish_oldest(
        self, in_flight: deque[tuple[Flight, bool]], held: set[int], rank: int
    ) -> "Iterator[float | Flight]":
        flight, incoming = in_flight.popleft()
        yield flight
        if incoming:
            if self.ranks[rank].passes_on:  # what is not verified is no source
                yield self.weights.digest_s[flight.index]
            yield self.weights.unpack_s[flight.index]
            self.ranks[rank].received_bytes += self.weights.num_bytes[flight.index]
            held.add(flight.index)

    def _ready(self, index: int, sender: int, receiver: int) -> Flight:
        """One end is ready; the second one starts the flight."""
        flight = self.flights.setdefault((index, receiver), Flight(index))
        flight.ends_ready += 1
        if flight.ends_ready == 2:
            del self.flights[index, receiver]
            self.clock.after(self.speeds.latency_s, lambda: self._take_off(flight, sender, receiver))
        return flight

    def _take_off(self, flight: Flight, sender: int, receiver: int) -> None:
        """The messages of one sender to one receiver go one after the other."""
        line = self.lines.setdefault((sender, receiver), deque())
        line.append(flight)
        if len(line) == 1:
            self._fly(flight, sender, receiver)

    def _fly(self, flight: Flight, sender: int, receiver: int) -> None:
        self.machine.send(
            self.weights.num_bytes[flight.index],
            self.ranks[sender].out,
            self.ranks[receiver].into,
            self.speeds.link_cores / self.speeds.trainer_link,
            partial(self._arrive, flight, sender, receiver),
        )

    def _arrive(self, flight: Flight, sender: int, receiver: int) -> None:
        flight.arrived = True
        line = self.lines[sender, receiver]
        line.popleft()
        if line:
            self._fly(line[0], sender, receiver)
        else:
            del self.lines[sender, receiver]
        self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Tells both ends, once payload and header are there."""
        if not (flight.arrived and flight.signed):
            return
        flight.landed = True
        for go_on in flight.waiters:
            go_on()
