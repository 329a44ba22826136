"""Same host: receivers copy from the trainer's memory straight into their parameters; no payload crosses a socket.

Every receiver reads the trainer's memory itself, so there is no chain. Headers and acknowledgements go over the
communicator: that is how a dead peer is noticed. Where the parameters can be laid open themselves, the trainer only
hashes; else (a cast at the source, no room in /dev/shm) it packs messages into two slots, filled in turn.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from servicekit.errors import DeadlineExceeded
from weightsync.digest import HEADER_BYTES
from weightsync.layout import Layout
from weightsync.messages import Message
from weightsync.participants import Participants
from weightsync.round_plan import RoundPlan
from weightsync.transports.communicator import Communicator, Pending
from weightsync.transports.packing import Packer
from weightsync.transports.shared_memory import Exposure, Opened
from weightsync.transports.transport import TransferJob, TransferStats, message_digest

SLOTS = 2
WINDOW = 64  # messages whose header is under way: 4 KiB of headers


@dataclass(kw_only=True)
class _Offered:
    message: Message
    works: list[tuple[Pending, int]]  # header sent, acknowledgement awaited; with the peer


class _Waits:
    """Waits on the communicator within the job's deadline."""

    def __init__(self, communicator: Communicator, job: TransferJob) -> None:
        self._comm = communicator
        self._job = job

    def wait(self, pending: Pending, peer: int) -> None:
        remaining = self._job.deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(
                f"transfer not finished in {self._job.timeout_s:g} s; waiting for {self._comm.slots[peer]}"
            )
        self._comm.wait(pending, peer, remaining)


class MemorySource:
    """The trainer's end."""

    name = "colocated"

    def __init__(self, communicator: Communicator, exposure: Exposure) -> None:
        self._comm = communicator
        self._exposure = exposure
        self._slots = int(exposure.description.slots)
        self._slot_bytes = int(exposure.description.slot_bytes)

    def run(self, job: TransferJob) -> TransferStats:
        """See Transport."""
        start = time.monotonic()
        waits = _Waits(self._comm, job)
        stats = TransferStats(staging_bytes=self._slots * self._slot_bytes)
        offered: deque[_Offered] = deque()
        for number, (message, readers) in enumerate(offers_of(job.plan, job.participants, self._comm.rank)):
            while len(offered) >= (self._slots or WINDOW):
                self._finish(offered.popleft(), waits)
            offered.append(self._offer(job, message, readers, number))
            stats.num_messages += 1
            stats.bytes_sent += job.packer.payload_bytes(message)
        while offered:
            self._finish(offered.popleft(), waits)
        stats.seconds = time.monotonic() - start
        return stats

    def _offer(self, job: TransferJob, message: Message, readers: Sequence[int], number: int) -> _Offered:
        if self._slots == 0:
            digest = message_digest(job.packer, message)
        else:
            begin = number % self._slots * self._slot_bytes
            payload = self._exposure.tensors[0][begin : begin + job.packer.payload_bytes(message)]
            job.packer.pack(message, payload)
            digest = message_digest(job.packer, message, job.packer.split(message, payload))
        head = job.header(message, digest)  # the digest has waited for the device: the bytes are there
        works = []
        for reader in readers:
            acknowledgement = torch.empty(1, dtype=torch.uint8)
            works.append((self._comm.receive(acknowledgement, reader, message.sequence), reader))
            works.append((self._comm.send(head, reader, message.sequence), reader))
        return _Offered(message=message, works=works)

    def _finish(self, offered: _Offered, waits: _Waits) -> None:
        for pending, peer in offered.works:
            waits.wait(pending, peer)

    def close(self) -> None:
        """See Transport."""
        self._exposure.close()


class MemoryReader:
    """A receiver's end. memories: by trainer rank."""

    name = "colocated"

    def __init__(self, communicator: Communicator, memories: Sequence[Opened]) -> None:
        self._comm = communicator
        self._memories = memories
        self._sources: dict[int, Packer] = {}
        self._numbers: tuple[str, dict[int, int]] = ("", {})

    def run(self, job: TransferJob) -> TransferStats:
        """See Transport."""
        start = time.monotonic()
        waits = _Waits(self._comm, job)
        stats = TransferStats()
        numbers = self._numbered(job)
        mine = messages_for(job.plan, job.participants, self._comm.rank)
        heads: list[tuple[torch.Tensor, Pending]] = []
        acknowledgements = []
        for index, message in enumerate(mine):
            for coming in mine[len(heads) : index + WINDOW]:
                head = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                heads.append((head, self._comm.receive(head, coming.src, coming.sequence)))
            head, pending = heads[index]
            waits.wait(pending, message.src)
            stats.received.append((message, job.digest_in(head, message)))
            self._copy(job, message, numbers[message.sequence])
            done = torch.ones(1, dtype=torch.uint8)
            acknowledgements.append((self._comm.send(done, message.src, message.sequence), message.src))
            stats.num_messages += 1
            stats.bytes_received += job.packer.payload_bytes(message)
        for pending, peer in acknowledgements:
            waits.wait(pending, peer)
        stats.seconds = time.monotonic() - start
        return stats

    def _copy(self, job: TransferJob, message: Message, number: int) -> None:
        memory = self._memories[message.src]
        if memory.description.slots > 0:
            job.packer.unpack(message, memory.slot(number)[: job.packer.payload_bytes(message)])
        else:
            source = self._source(job, message.src)
            for theirs, ours in zip(source.segments(message), job.packer.segments(message), strict=True):
                for from_, to in zip(theirs.blocks, ours.blocks, strict=True):
                    to.values.copy_(from_.values)
        if job.packer.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the acknowledgement says that the memory was read

    def _source(self, job: TransferJob, rank: int) -> Packer:
        if rank not in self._sources:
            layout: Layout = next(iter(job.plan.plans.values())).source
            memory = self._memories[rank]
            tensors = {
                name: memory.parameter(name, shape, job.packer.dtype)
                for name, shape in layout.parameters_of(rank).items()
            }
            self._sources[rank] = Packer(layout, tensors, "src")
        return self._sources[rank]

    def _numbered(self, job: TransferJob) -> dict[int, int]:
        """For each message, how many its sender has offered before it."""
        if self._numbers[0] != job.plan.digest:
            numbers: dict[int, int] = {}
            offered = [0] * job.participants.trainer.world_size
            for message in all_messages(job.plan):
                numbers[message.sequence] = offered[message.src]
                offered[message.src] += 1
            self._numbers = (job.plan.digest, numbers)
            self._sources.clear()
        return self._numbers[1]

    def close(self) -> None:
        """See Transport."""
        self._sources.clear()
        self._memories = ()


def all_messages(plan: RoundPlan) -> list[Message]:
    """Every message of the round, by sequence."""
    return [message for messages in plan.messages.values() for message in messages]


def offers_of(plan: RoundPlan, participants: Participants, rank: int) -> list[tuple[Message, list[int]]]:
    """What trainer rank `rank` offers, in order: each message, and the communicator ranks that read it."""
    offers = []
    for parallel, names in participants.chains().items():
        firsts = [participants.first_rank[name] for name in names]
        offers += [(m, [first + m.dst for first in firsts]) for m in plan.messages[parallel] if m.src == rank]
    return offers


def messages_for(plan: RoundPlan, participants: Participants, rank: int) -> list[Message]:
    """What receiver `rank` (of the communicator) reads, in order."""
    replica, tensor_rank = participants.slots[rank].rsplit("/", 1)
    return [m for m in plan.messages[participants.replicas[replica]] if m.dst == int(tensor_rank)]
