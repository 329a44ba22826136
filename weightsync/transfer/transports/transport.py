"""What all transports have in common: the job, the statistics, and the check of what was installed."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from servicekit.errors import DeadlineExceeded, DigestMismatch
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.plans.messages import Message
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan
from weightsync.transfer.communicators.communicator import Communicator, Pending
from weightsync.transfer.digest import HEADER_BYTES, Header, PayloadDigest, check_header, read_header, write_header
from weightsync.transfer.transports.packing import Packer


@dataclass(frozen=True, kw_only=True)
class TransferJob:
    """One rank's part of one transfer.

    Attributes:
        model: fingerprint of the model.
        packer: of the memory that is read (a trainer rank) or written (a receiver).
        deadline: time.monotonic() seconds.
        timeout_s: seconds from the start to the deadline, for messages.
    """

    model: str
    round_id: str
    plan: RoundPlan
    participants: Participants
    packer: Packer
    policy_version: int
    bucket_bytes: int
    deadline: float
    timeout_s: float

    def header(self, message: Message, digest: bytes) -> torch.Tensor:
        """Make the header of a message of this round, as bytes to send."""
        head = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        write_header(head.numpy(), self._header_of(message, digest))
        return head

    def digest_in(self, head: torch.Tensor, message: Message) -> bytes:
        """Return a header's payload digest. Raises: DigestMismatch: it is of another message, plan or version."""
        header = read_header(head.numpy())
        check_header(header, self._header_of(message, header.payload_digest))
        return header.payload_digest

    def _header_of(self, message: Message, digest: bytes) -> Header:
        return Header(
            plan_digest=self.plan.digest,
            policy_version=self.policy_version,
            sequence=message.sequence,
            payload_bytes=self.packer.payload_bytes(message),
            payload_digest=digest,
        )

    def wait(self, communicator: Communicator, works: Iterable[tuple[Pending, int]]) -> None:
        """Wait for operations, each with its peer. Raises: DeadlineExceeded, PeerLost: naming the peer."""
        for pending, peer in works:
            remaining = self.deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(
                    f"transfer not finished in {self.timeout_s:g} s; waiting for {communicator.slots[peer]}"
                )
            communicator.wait(pending, peer, remaining)


@dataclass(kw_only=True)
class TransferStats:
    """What one rank transferred.

    Attributes:
        bytes_sent: a byte that several receivers read from shared memory, or from a file, counts once.
        staging_bytes: peak of the buffers that are neither parameters nor their staged copy.
        received: messages, each with the sender's digest.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    num_messages: int = 0
    staging_bytes: int = 0
    received: list[tuple[Message, bytes]] = field(default_factory=list)

    def accept(self, job: TransferJob, message: Message, head: torch.Tensor) -> None:
        """Count a received message. Raises: DigestMismatch: the header is of another one."""
        self.received.append((message, job.digest_in(head, message)))
        self.num_messages += 1
        self.bytes_received += job.packer.payload_bytes(message)

    def report(self, shard_bytes: int, seconds: float) -> pb.PhaseReport:
        """Make the report of TRANSFER, which took `seconds`."""
        report = pb.PhaseReport(
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            shard_bytes=shard_bytes,
            num_messages=self.num_messages,
            staging_bytes=self.staging_bytes,
        )
        report.seconds["transfer"] = seconds
        return report


class Transport(Protocol):
    """A way to carry the bytes of rounds between the ranks of one communicator."""

    @property
    def name(self) -> str:
        """ "collective", "colocated" or "disk"."""
        ...

    def run(self, job: TransferJob) -> TransferStats:
        """Transfer this rank's bytes; blocks until no rank reads or writes its memory any more.

        Raises: PeerLost; DigestMismatch: a message is not the expected one; DeadlineExceeded.
        """
        ...

    def close(self) -> None:
        """Release buffers and mappings."""
        ...


def message_digest(packer: Packer, message: Message, parts: Iterable[torch.Tensor] | None = None) -> bytes:
    """Digest the message's payload: `parts`, or what is in the packer's memory now."""
    digest = PayloadDigest()
    for part in packer.stored(message) if parts is None else parts:
        digest.update(part)
    return digest.digest()


def wrong_messages(received: Sequence[tuple[Message, bytes]], packer: Packer) -> list[Message]:
    """Return the messages whose installed bytes do not have the digest that the sender recorded."""
    return [message for message, digest in received if message_digest(packer, message) != digest]


def check_complete(received: Sequence[tuple[Message, bytes]], elements: int) -> None:
    """Raise DigestMismatch unless the messages are the whole shard."""
    got = sum(message.elements for message, _ in received)
    if got != elements:
        raise DigestMismatch(f"{got} elements were received, the shard has {elements}")
