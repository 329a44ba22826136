"""Point-to-point transfer of packed messages, double-buffered, in the plan's global order."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from servicekit.errors import DeadlineExceeded
from weightsync.digest import HEADER_BYTES, Header, check_header, payload_digest, read_header, write_header
from weightsync.messages import Hop, Message
from weightsync.transports.communicator import Communicator
from weightsync.transports.packing import Packer

WINDOW = 2  # messages in flight per rank: the next one is packed or received while the last one moves


@dataclass(kw_only=True)
class TransferStats:
    """What one rank moved."""

    bytes_sent: int = 0
    bytes_received: int = 0
    num_messages: int = 0
    staging_bytes: int = 0
    seconds: float = 0.0
    digests: dict[int, bytes] = field(default_factory=dict)  # by sequence, as the trainer recorded them


@dataclass(kw_only=True)
class _InFlight:
    hop: Hop
    buffer: torch.Tensor  # of the pool's size; the message is its beginning
    work: torch.distributed.Work
    peer: int
    incoming: bool


class Transfer:
    """One rank's part of one transfer."""

    def __init__(
        self,
        *,
        communicator: Communicator,
        hops: Sequence[Hop],
        packer: Packer,
        plan_digest: str,
        policy_version: int,
        timeout_s: float,
    ) -> None:
        self._comm = communicator
        self._hops = hops
        self._packer = packer
        self._plan_digest = plan_digest
        self._version = policy_version
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._in_flight: deque[_InFlight] = deque()
        self._held: dict[int, torch.Tensor] = {}  # received messages that go on to the next replica
        self._free: list[torch.Tensor] = []
        self._relayed = {hop.message.sequence for hop in hops if hop.sender == communicator.rank and hop.hop > 0}
        self._capacity = HEADER_BYTES + max((packer.payload_bytes(hop.message) for hop in hops), default=0)
        self.stats = TransferStats()

    def run(self) -> TransferStats:
        """Walks the hops. Raises: PeerLost; DigestMismatch: a header is not the expected one; DeadlineExceeded."""
        start = time.monotonic()
        for hop in self._hops:
            while len(self._in_flight) >= WINDOW:
                self._finish_oldest()
            if hop.receiver == self._comm.rank:
                self._launch(hop, self._take_buffer(), incoming=True)
            elif hop.hop > 0:
                self._start_relay(hop)
            else:
                self._start_send(hop)
        while self._in_flight:
            self._finish_oldest()
        self.stats.seconds = time.monotonic() - start
        return self.stats

    def _take_buffer(self) -> torch.Tensor:
        """A buffer that holds any of this rank's messages."""
        if self._free:
            return self._free.pop()
        self.stats.staging_bytes += self._capacity
        return torch.empty(self._capacity, dtype=torch.uint8, device=self._packer.device)

    def _view(self, buffer: torch.Tensor, message: Message) -> torch.Tensor:
        return buffer[: HEADER_BYTES + self._packer.payload_bytes(message)]

    def _start_send(self, hop: Hop) -> None:
        buffer = self._take_buffer()
        view = self._view(buffer, hop.message)
        payload = view[HEADER_BYTES:]
        self._packer.pack(hop.message, payload)
        header = Header(
            plan_digest=self._plan_digest,
            policy_version=self._version,
            sequence=hop.message.sequence,
            payload_bytes=payload.numel(),
            payload_digest=payload_digest(as_numpy(payload)),
        )
        head = np.zeros(HEADER_BYTES, dtype=np.uint8)
        write_header(head, header)
        view[:HEADER_BYTES].copy_(torch.from_numpy(head))
        self._launch(hop, buffer, incoming=False)

    def _start_relay(self, hop: Hop) -> None:
        while hop.message.sequence not in self._held:
            self._finish_oldest()
        self._launch(hop, self._held.pop(hop.message.sequence), incoming=False)

    def _launch(self, hop: Hop, buffer: torch.Tensor, *, incoming: bool) -> None:
        peer = hop.sender if incoming else hop.receiver
        start = self._comm.receive if incoming else self._comm.send
        work = start(self._view(buffer, hop.message), peer, hop.message.sequence)
        self._in_flight.append(_InFlight(hop=hop, buffer=buffer, work=work, peer=peer, incoming=incoming))

    def _finish_oldest(self) -> None:
        item = self._in_flight.popleft()
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(
                f"transfer not finished in {self._timeout_s:g} s; waiting for {self._comm.slots[item.peer]}"
            )
        self._comm.wait(item.work, item.peer, remaining)
        self.stats.num_messages += 1
        message = item.hop.message
        if item.incoming:
            self._accept(message, self._view(item.buffer, message))
            self.stats.bytes_received += self._packer.payload_bytes(message)
        else:
            self.stats.bytes_sent += self._packer.payload_bytes(message)
        if item.incoming and message.sequence in self._relayed:
            self._held[message.sequence] = item.buffer
        else:
            self._free.append(item.buffer)

    def _accept(self, message: Message, view: torch.Tensor) -> None:
        header = read_header(as_numpy(view[:HEADER_BYTES]))
        payload = view[HEADER_BYTES:]
        check_header(
            header,
            plan_digest=self._plan_digest,
            policy_version=self._version,
            sequence=message.sequence,
            payload_bytes=payload.numel(),
        )
        self.stats.digests[message.sequence] = header.payload_digest
        self._packer.unpack(message, payload)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous uint8 tensor, without a copy on CPU."""
    array: np.ndarray = tensor.cpu().numpy()
    return array


def verify_installed(
    messages: Sequence[Message], digests: Mapping[int, bytes], packer: Packer
) -> list[tuple[Message, bytes]]:
    """Messages whose installed bytes do not have the digest that the trainer recorded, with the digest found."""
    wrong = []
    for message in messages:
        scratch = torch.empty(packer.payload_bytes(message), dtype=torch.uint8, device=packer.device)
        packer.pack(message, scratch)
        found = payload_digest(as_numpy(scratch))
        if digests.get(message.sequence) != found:
            wrong.append((message, found))
    return wrong
