"""The transport collective: point-to-point messages, several under way, in the plan's order, from replica to replica.

A message travels as its segments, then its header: contiguous blocks go from parameter to parameter without a copy,
the rest through a buffer. Each segment is hashed while it is in the core's cache: by the sender right after its send
was posted, by a rank that passes it on after it has arrived.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from servicekit.errors import DigestMismatch, PeerLost
from weightsync.plans.limits import number_of_buffers
from weightsync.plans.messages import Hop, Link, Message, links_of
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan
from weightsync.plans.walk import Step, walk
from weightsync.transfer.communicators.communicator import Communicator, Pending
from weightsync.transfer.communicators.watched import run_watched
from weightsync.transfer.digest import HEADER_BYTES, PayloadDigest
from weightsync.transfer.transports.packing import Packer, Segment
from weightsync.transfer.transports.transport import TransferJob, TransferStats


@dataclass(kw_only=True)
class _Flight:
    """A message under way: the bytes of each segment, and its header. buffer: None where no segment needs one."""

    segments: Sequence[Segment]
    parts: list[torch.Tensor]
    head: torch.Tensor
    buffer: torch.Tensor | None
    works: list[Pending]


class Buffers:
    """A pool of buffers of one size, kept from round to round, for bytes that cannot go from parameter to parameter.

    Attributes:
        peak_bytes: bytes of all buffers allocated so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = 0
        self._free: list[torch.Tensor] = []
        self.peak_bytes = 0

    def resize(self, size: int, largest_message: int) -> int:
        """Set the size to at least this many bytes; drop buffers of an older plan if too small or too many.

        Returns: how many may be taken.
        """
        kept = max(size, self._size)
        if size > self._size or self.peak_bytes > number_of_buffers(kept, largest_message) * kept:
            self._size, self.peak_bytes = size, 0
            self._free.clear()
        return number_of_buffers(self._size, largest_message)

    def take(self) -> torch.Tensor:
        """Take a buffer; give() returns it."""
        if self._free:
            return self._free.pop()
        self.peak_bytes += self._size
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer."""
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
    """Does the steps of this rank's walk."""

    def __init__(self, communicator: Communicator, job: TransferJob, hops: Sequence[Hop], buffers: Buffers) -> None:
        self._comm = communicator
        self._job = job
        self._packer: Packer = job.packer
        self._hops, self._buffers = hops, buffers
        self._flights: dict[int, _Flight] = {}  # by sequence
        self._stats = TransferStats()

    def run(self) -> TransferStats:
        number = self._buffers.resize(
            max((self._packer.staged_bytes(hop.message) for hop in self._hops), default=0),
            max((self._packer.payload_bytes(hop.message) for hop in self._hops), default=0),
        )
        actions: dict[Step, Callable[[Hop], None]] = {
            Step.SEND: self._send,
            Step.SENT: self._sent,
            Step.RECEIVE: self._receive,
            Step.RECEIVED: self._received,
            Step.VERIFIED: lambda hop: self._received(hop, PayloadDigest()),
            Step.RELAY: self._relay,
            Step.UNPACK: self._unpack,
            Step.UNPACKED: self._release,
        }
        for step, hop in walk(self._comm.rank, self._hops, number, self._needs_buffer):
            actions[step](hop)
        self._stats.staging_bytes = self._buffers.peak_bytes
        return self._stats

    # ---- sending ----

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

    def _relay(self, hop: Hop) -> None:
        flight = self._flights[hop.message.sequence]
        parts = (*flight.parts, flight.head)
        flight.works = [self._comm.send(part, hop.receiver, hop.message.sequence, lane=hop.hop) for part in parts]

    def _sent(self, hop: Hop) -> None:
        self._job.wait(self._comm, [(work, hop.receiver) for work in self._flights[hop.message.sequence].works])
        self._stats.num_messages += 1
        self._stats.bytes_sent += self._packer.payload_bytes(hop.message)
        self._release(hop)

    # ---- receiving ----

    def _receive(self, hop: Hop) -> None:
        flight = self._flight(hop)
        for part in (*flight.parts, flight.head):
            flight.works.append(self._comm.receive(part, hop.sender, hop.message.sequence, lane=hop.hop))

    def _received(self, hop: Hop, digest: PayloadDigest | None = None) -> None:
        """Wait for a message and check its header; the digest of its bytes is checked here, or else in VERIFY."""
        message, flight = hop.message, self._flights[hop.message.sequence]
        for part, work in zip(flight.parts, flight.works[:-1], strict=True):
            self._job.wait(self._comm, [(work, hop.sender)])
            if digest is not None:
                digest.update(part)
        self._job.wait(self._comm, [(flight.works[-1], hop.sender)])
        expected = self._job.digest_in(flight.head, message)
        if digest is not None and digest.digest() != expected:
            raise DigestMismatch(
                f"{self._comm.slots[self._comm.rank]}: message {message.sequence} from "
                f"{self._comm.slots[hop.sender]} is not what was sent first; it is not passed on"
            )
        self._stats.num_messages += 1
        self._stats.bytes_received += self._packer.payload_bytes(message)
        self._stats.received.append((message, expected))

    def _unpack(self, hop: Hop) -> None:
        flight = self._flights[hop.message.sequence]
        for segment, part in zip(flight.segments, flight.parts, strict=True):
            if segment.lent is None:
                self._packer.unpack_segment(segment, part)

    # ---- buffers ----

    def _needs_buffer(self, message: Message) -> bool:
        return self._packer.staged_bytes(message) > 0

    def _flight(self, hop: Hop) -> _Flight:
        """Lay out a message's bytes: in the parameters, or in a buffer."""
        segments = self._packer.segments(hop.message)
        buffer = self._buffers.take() if self._needs_buffer(hop.message) else None
        parts = []
        begin = 0
        for segment in segments:
            if segment.lent is not None or buffer is None:
                parts.append(segment.lent if segment.lent is not None else torch.empty(0))
            else:
                parts.append(buffer[begin : begin + segment.num_bytes])
                begin += segment.num_bytes
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        flight = _Flight(segments=segments, parts=parts, head=head, buffer=buffer, works=[])
        self._flights[hop.message.sequence] = flight
        return flight

    def _release(self, hop: Hop) -> None:
        flight = self._flights.pop(hop.message.sequence)
        if flight.buffer is not None:
            self._buffers.give(flight.buffer)
