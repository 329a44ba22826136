"""Point-to-point transfer of messages, double-buffered, in the plan's global order, passed on from replica to replica.

A message travels as its segments, then its header: contiguous blocks go from parameter to parameter without a copy,
the rest through a buffer; the sender hashes while the segments are under way.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from servicekit.errors import DeadlineExceeded, DigestMismatch
from weightsync.digest import HEADER_BYTES
from weightsync.messages import Hop, Message
from weightsync.transports.communicator import Communicator, Pending
from weightsync.transports.packing import Packer, Segment
from weightsync.transports.transport import TransferJob, TransferStats, message_digest

WINDOW = 2  # messages in flight per rank: the next one is packed or received while the last one moves


@dataclass(kw_only=True)
class _Pieces:
    """A message in memory: the bytes of each segment, and its header. buffer: None where no segment needs one."""

    segments: Sequence[Segment]
    parts: list[torch.Tensor]
    head: torch.Tensor
    buffer: torch.Tensor | None


@dataclass(kw_only=True)
class _InFlight:
    hop: Hop
    pieces: _Pieces
    works: list[Pending]
    peer: int
    incoming: bool


class Buffers:
    """Buffers of one size, reused from round to round. peak_bytes: all that were ever in use at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = 0
        self._free: list[torch.Tensor] = []
        self.peak_bytes = 0

    def resize(self, size: int) -> None:
        """Makes buffers of at least this many bytes; those of an older plan go if they are too small."""
        if size > self._size:
            self._size, self.peak_bytes = size, 0
            self._free.clear()

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        self.peak_bytes += self._size
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


class CollectiveTransport:
    """Messages over a communicator (gloo or NCCL)."""

    name = "collective"

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._comm = communicator
        self._buffers = Buffers(device)
        self._hops: tuple[str, list[Hop]] = ("", [])

    def run(self, job: TransferJob) -> TransferStats:
        """See Transport."""
        if self._hops[0] != job.plan.digest:
            self._hops = (job.plan.digest, job.plan.hops_of(self._comm.rank, job.participants))
        return _Walk(self._comm, job, self._hops[1], self._buffers).run()

    def close(self) -> None:
        """See Transport."""


class _Walk:
    """One rank's walk over its hops."""

    def __init__(self, communicator: Communicator, job: TransferJob, hops: Sequence[Hop], buffers: Buffers) -> None:
        self._comm = communicator
        self._job = job
        self._packer: Packer = job.packer
        self._hops = hops
        self._buffers = buffers
        self._in_flight: deque[_InFlight] = deque()
        self._held: dict[int, _Pieces] = {}  # received messages that go on to the next replica
        self._relayed = {hop.message.sequence for hop in hops if hop.sender == communicator.rank and hop.hop > 0}
        self._stats = TransferStats()
        buffers.resize(max((self._packer.staged_bytes(hop.message) for hop in hops), default=0))

    def run(self) -> TransferStats:
        start = time.monotonic()
        for hop in self._hops:
            while len(self._in_flight) >= WINDOW:
                self._finish_oldest()
            if hop.receiver == self._comm.rank:
                self._start_receive(hop)
            elif hop.hop > 0:
                self._start_relay(hop)
            else:
                self._start_send(hop)
        while self._in_flight:
            self._finish_oldest()
        self._stats.seconds = time.monotonic() - start
        self._stats.staging_bytes = self._buffers.peak_bytes
        return self._stats

    def _pieces(self, message: Message) -> _Pieces:
        """Where the message's bytes are, or will be."""
        segments = self._packer.segments(message)
        staged = any(segment.lent is None for segment in segments)
        buffer = self._buffers.take() if staged else None
        parts = []
        begin = 0
        for segment in segments:
            if segment.lent is not None or buffer is None:
                parts.append(segment.lent if segment.lent is not None else torch.empty(0))
            else:
                parts.append(buffer[begin : begin + segment.num_bytes])
                begin += segment.num_bytes
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        return _Pieces(segments=segments, parts=parts, head=head, buffer=buffer)

    def _start_send(self, hop: Hop) -> None:
        pieces = self._pieces(hop.message)
        works = []
        for segment, part in zip(pieces.segments, pieces.parts, strict=True):
            if segment.lent is None:
                self._packer.pack_segment(segment, part)
            works.append(self._comm.send(part, hop.receiver, hop.message.sequence))
        pieces.head = self._job.header(hop.message, message_digest(self._packer, hop.message, pieces.parts))
        works.append(self._comm.send(pieces.head, hop.receiver, hop.message.sequence))
        self._in_flight.append(_InFlight(hop=hop, pieces=pieces, works=works, peer=hop.receiver, incoming=False))

    def _start_receive(self, hop: Hop) -> None:
        pieces = self._pieces(hop.message)
        works = [self._comm.receive(p, hop.sender, hop.message.sequence) for p in (*pieces.parts, pieces.head)]
        self._in_flight.append(_InFlight(hop=hop, pieces=pieces, works=works, peer=hop.sender, incoming=True))

    def _start_relay(self, hop: Hop) -> None:
        while hop.message.sequence not in self._held:
            self._finish_oldest()
        pieces = self._held.pop(hop.message.sequence)
        works = [self._comm.send(p, hop.receiver, hop.message.sequence) for p in (*pieces.parts, pieces.head)]
        self._in_flight.append(_InFlight(hop=hop, pieces=pieces, works=works, peer=hop.receiver, incoming=False))

    def _finish_oldest(self) -> None:
        item = self._in_flight.popleft()
        for work in item.works:
            self._comm.wait(work, item.peer, self._remaining(item.peer))
        message = item.hop.message
        self._stats.num_messages += 1
        if not item.incoming:
            self._stats.bytes_sent += self._packer.payload_bytes(message)
            self._release(item.pieces)
            return
        self._accept(item)
        self._stats.bytes_received += self._packer.payload_bytes(message)
        if message.sequence in self._relayed:
            self._held[message.sequence] = item.pieces
        else:
            self._release(item.pieces)

    def _accept(self, item: _InFlight) -> None:
        """Checks the header, and the payload too where it goes on: what is not verified is no source."""
        message, pieces = item.hop.message, item.pieces
        digest = self._job.digest_in(pieces.head, message)
        if message.sequence in self._relayed and message_digest(self._packer, message, pieces.parts) != digest:
            raise DigestMismatch(
                f"{self._comm.slots[self._comm.rank]}: message {message.sequence} from "
                f"{self._comm.slots[item.peer]} is not what the trainer sent; it is not passed on"
            )
        self._stats.received.append((message, digest))
        for segment, part in zip(pieces.segments, pieces.parts, strict=True):
            if segment.lent is None:
                self._packer.unpack_segment(segment, part)

    def _release(self, pieces: _Pieces) -> None:
        if pieces.buffer is not None:
            self._buffers.give(pieces.buffer)

    def _remaining(self, peer: int) -> float:
        remaining = self._job.deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(
                f"transfer not finished in {self._job.timeout_s:g} s; waiting for {self._comm.slots[peer]}"
            )
        return remaining
