"""The transport collective: point-to-point messages, several under way, in the plan's order, from replica to replica.

A message travels as its segments, then its header: contiguous blocks go from parameter to parameter without a copy,
the rest through a buffer. Each segment is hashed while it is in the core's cache: by the sender right after its send
was posted, by a rank that passes it on after it has arrived.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from servicekit.errors import DigestMismatch, PeerLost
from weightsync.plans.limits import RECEIVES, SENDS, number_of_buffers
from weightsync.plans.messages import Hop, Link, Message, links_of
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan
from weightsync.transfer.communicators.communicator import Communicator, Pending
from weightsync.transfer.communicators.watched import run_watched
from weightsync.transfer.digest import HEADER_BYTES, PayloadDigest
from weightsync.transfer.transports.packing import Packer, Segment
from weightsync.transfer.transports.transport import TransferJob, TransferStats, Waits


@dataclass(kw_only=True)
class _Flight:
    """A message under way: the bytes of each segment, and its header. buffer: None where no segment needs one."""

    hop: Hop
    segments: Sequence[Segment]
    parts: list[torch.Tensor]
    head: torch.Tensor
    buffer: torch.Tensor | None
    works: list[Pending]

    @property
    def message(self) -> Message:
        return self.hop.message


class Buffers:
    """A pool of buffers of one size, kept from round to round, for bytes that cannot go from parameter to parameter.

    It has as many as two of the round's largest messages fill, and at least two.

    Attributes:
        peak_bytes: bytes of all buffers allocated so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = 0
        self._number = 0
        self._used = 0
        self._free: list[torch.Tensor] = []
        self.peak_bytes = 0

    def resize(self, size: int, largest_message: int) -> None:
        """Set the size to at least this many bytes; drop buffers of an older plan if too small or too many."""
        kept = max(size, self._size)
        if size > self._size or self.peak_bytes > number_of_buffers(kept, largest_message) * kept:
            self._size, self.peak_bytes = size, 0
            self._free.clear()
        self._number = number_of_buffers(self._size, largest_message)
        self._used = 0

    def are_left(self) -> bool:
        """Whether take() may be called."""
        return self._used < self._number

    def take(self) -> torch.Tensor:
        """Take a buffer; give() returns it."""
        self._used += 1
        if self._free:
            return self._free.pop()
        self.peak_bytes += self._size
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer."""
        self._used -= 1
        self._free.append(buffer)


class CollectiveTransport:
    """The transport collective: messages over a communicator (gloo or NCCL)."""

    name = "collective"

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._comm = communicator
        self._buffers = Buffers(device)
        self._hops: tuple[str, list[Hop]] = ("", [])
        self._connected = ""  # digest of the plan whose links are connected

    def connect(self, plan: RoundPlan, participants: Participants, deadline: float) -> None:
        """Connect this rank with those that the plan pairs it with, and with no others. Every rank calls it.

        It runs in PREPARE, during generation, so that no message of TRANSFER waits for a connection.

        Args:
            deadline: time.monotonic() seconds.
        Raises: PeerLost: naming both ranks of a link that was not connected; the communicator is closed then.
        """
        if plan.digest == self._connected:
            return
        walk = _Connecting(self._comm, links_of(self._hops_of(plan, participants), len(self._comm.slots)), deadline)
        run_watched(self._comm, walk.run, deadline, walk.late)
        self._connected = plan.digest

    def run(self, job: TransferJob) -> TransferStats:
        """Transfer the messages of this rank's hops: see Transport."""
        return _Walk(self._comm, job, self._hops_of(job.plan, job.participants), self._buffers).run()

    def _hops_of(self, plan: RoundPlan, participants: Participants) -> list[Hop]:
        if self._hops[0] != plan.digest:
            self._hops = (plan.digest, plan.hops_of(self._comm.rank, participants))
        return self._hops[1]

    def close(self) -> None:
        """Release nothing: the buffers are reused."""


class _Connecting:
    """One rank's walk over its links, one after the other, so that an error names the link."""

    def __init__(self, communicator: Communicator, links: Sequence[Link], deadline: float) -> None:
        self._comm = communicator
        self._links = links
        self._deadline = deadline
        self._now = ""

    def run(self) -> None:
        slots = self._comm.slots
        for link in self._links:
            self._now = f"{slots[link.sender]} and {slots[link.receiver]} did not connect"
            left_s = self._deadline - time.monotonic()
            try:
                self._comm.connect(link.sender, link.receiver, link.hop, left_s)
            except PeerLost as error:
                raise PeerLost(f"{self._now}: {error}") from error

    def late(self) -> str:
        return f"{self._now} in time"


class _Walk:
    """One rank's walk over its hops.

    It waits only for the oldest message, whose other end gets to it too: the order is the same on all ranks.
    """

    def __init__(self, communicator: Communicator, job: TransferJob, hops: Sequence[Hop], buffers: Buffers) -> None:
        self._comm = communicator
        self._job = job
        self._waits = Waits(communicator, job)
        self._packer: Packer = job.packer
        self._buffers = buffers
        self._outgoing: deque[_Flight] = deque()
        self._incoming: deque[_Flight] = deque()
        self._to_send = [hop for hop in hops if hop.sender == communicator.rank and hop.hop == 0]
        self._to_receive = deque(hop for hop in hops if hop.receiver == communicator.rank)
        self._relays = {hop.message.sequence: hop for hop in hops if hop.sender == communicator.rank and hop.hop > 0}
        self._stats = TransferStats()
        buffers.resize(
            max((self._packer.staged_bytes(hop.message) for hop in hops), default=0),
            max((self._packer.payload_bytes(hop.message) for hop in hops), default=0),
        )

    def run(self) -> TransferStats:
        start = time.monotonic()
        for hop in self._to_send:
            self._make_room()
            self._send(hop)
        while self._to_receive or self._incoming:
            self._receive_ahead()
            self._accept(self._incoming.popleft())
        while self._outgoing:
            self._finish_send()
        self._stats.seconds = time.monotonic() - start
        self._stats.staging_bytes = self._buffers.peak_bytes
        return self._stats

    # ---- sending ----

    def _make_room(self) -> None:
        while len(self._outgoing) >= SENDS:
            self._finish_send()

    def _send(self, hop: Hop) -> None:
        flight = self._flight(hop)
        digest = PayloadDigest()
        for segment, part in zip(flight.segments, flight.parts, strict=True):
            if segment.lent is None:
                self._packer.pack_segment(segment, part)
            flight.works.append(self._comm.send(part, hop.receiver, hop.message.sequence, lane=hop.hop))
            digest.update(part)
        flight.head = self._job.header(hop.message, digest.digest())
        flight.works.append(self._comm.send(flight.head, hop.receiver, hop.message.sequence))
        self._outgoing.append(flight)

    def _relay(self, flight: _Flight, hop: Hop) -> None:
        self._make_room()
        flight.hop = hop
        parts = (*flight.parts, flight.head)
        flight.works = [self._comm.send(part, hop.receiver, hop.message.sequence, lane=hop.hop) for part in parts]
        self._outgoing.append(flight)

    def _finish_send(self) -> None:
        flight = self._outgoing.popleft()
        for work in flight.works:
            self._waits.wait(work, flight.hop.receiver)
        self._stats.num_messages += 1
        self._stats.bytes_sent += self._packer.payload_bytes(flight.message)
        self._release(flight)

    # ---- receiving ----

    def _receive_ahead(self) -> None:
        """Post receives for the next messages; for at least one, waiting for a buffer if needed."""
        while self._to_receive and len(self._incoming) < RECEIVES:
            hop = self._to_receive[0]
            while self._needs_buffer(hop) and not self._buffers.are_left():
                if self._incoming:
                    return
                self._finish_send()  # no receive is under way, so sends hold the buffers
            self._to_receive.popleft()
            flight = self._flight(hop)
            for part in (*flight.parts, flight.head):
                flight.works.append(self._comm.receive(part, hop.sender, hop.message.sequence, lane=hop.hop))
            self._incoming.append(flight)

    def _needs_buffer(self, hop: Hop) -> bool:
        return self._packer.staged_bytes(hop.message) > 0

    def _accept(self, flight: _Flight) -> None:
        """Wait for a message, check its header, pass it on if this rank is not the last of its chain, and unpack it."""
        message, sender = flight.message, flight.hop.sender
        onward = self._relays.get(message.sequence)
        digest = PayloadDigest()
        for part, work in zip(flight.parts, flight.works[:-1], strict=True):
            self._waits.wait(work, sender)
            if onward is not None:
                digest.update(part)
        self._waits.wait(flight.works[-1], sender)
        expected = self._job.digest_in(flight.head, message)
        if onward is not None and digest.digest() != expected:  # pass on verified bytes only
            raise DigestMismatch(
                f"{self._comm.slots[self._comm.rank]}: message {message.sequence} from "
                f"{self._comm.slots[sender]} is not what the trainer sent; it is not passed on"
            )
        self._stats.num_messages += 1
        self._stats.bytes_received += self._packer.payload_bytes(message)
        self._stats.received.append((message, expected))
        if onward is not None:
            self._relay(flight, onward)
        for segment, part in zip(flight.segments, flight.parts, strict=True):
            if segment.lent is None:
                self._packer.unpack_segment(segment, part)
        if onward is None:
            self._release(flight)

    # ---- both ----

    def _flight(self, hop: Hop) -> _Flight:
        """Lay out a message's bytes: in the parameters, or in a buffer."""
        segments = self._packer.segments(hop.message)
        buffer = self._buffers.take() if self._needs_buffer(hop) else None
        parts = []
        begin = 0
        for segment in segments:
            if segment.lent is not None or buffer is None:
                parts.append(segment.lent if segment.lent is not None else torch.empty(0))
            else:
                parts.append(buffer[begin : begin + segment.num_bytes])
                begin += segment.num_bytes
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        return _Flight(hop=hop, segments=segments, parts=parts, head=head, buffer=buffer, works=[])

    def _release(self, flight: _Flight) -> None:
        if flight.buffer is not None:
            self._buffers.give(flight.buffer)
