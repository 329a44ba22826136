"""The transport colocated: receivers on one host copy from the trainer's parameters into theirs; no payload is sent.

Every receiver reads the trainer's memory itself, so there is no chain. It begins when the trainer signals that its
memory holds the round's version, and copies while the trainer hashes; the headers hold the digests of what it should
have read. Headers and acknowledgements go over the communicator: that is how a lost peer is noticed.
"""

from collections.abc import Sequence

import torch

from weightsync.layouts.layout import Layout
from weightsync.plans.messages import Message
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan
from weightsync.transfer.communicators.communicator import Communicator, Pending
from weightsync.transfer.devices import wait_for_stream
from weightsync.transfer.digest import HEADER_BYTES
from weightsync.transfer.transports.packing import Packer
from weightsync.transfer.transports.shared_memory import Exposure, OpenedMemory
from weightsync.transfer.transports.transport import TransferJob, TransferStats, message_digest

_SIGNAL_TAG = 2**31 - 2  # of "begin" and "done"; larger than any message's sequence


class MemorySource:
    """The trainer's end: it exposes its parameters."""

    name = "colocated"

    def __init__(self, communicator: Communicator, exposure: Exposure) -> None:
        self._comm = communicator
        self._exposure = exposure

    def run(self, job: TransferJob) -> TransferStats:
        """Signal the readers, send the headers, and wait for the acknowledgements: see Transport."""
        stats = TransferStats()
        offers = offers_of(job.plan, job.participants, self._comm.rank)
        readers = sorted({reader for _, its_readers in offers for reader in its_readers})
        works: list[tuple[Pending, int]] = []
        begin = torch.ones(1, dtype=torch.uint8)
        done = {reader: torch.empty(1, dtype=torch.uint8) for reader in readers}
        wait_for_stream(job.packer.device)  # what is queued may still write the parameters
        for reader in readers:
            works.append((self._comm.send(begin, reader, _SIGNAL_TAG), reader))
            works.append((self._comm.receive(done[reader], reader, _SIGNAL_TAG), reader))
        for message, its_readers in offers:
            head = job.header(message, message_digest(job.packer, message))
            works += [(self._comm.send(head, reader, message.sequence), reader) for reader in its_readers]
            stats.num_messages += 1
            stats.bytes_sent += job.packer.payload_bytes(message)
        job.wait(self._comm, works)
        return stats

    def close(self) -> None:
        """Close the exposure."""
        self._exposure.close()


class MemoryReader:
    """A receiver's end: it copies from the parameters. memories: the trainer's, by rank."""

    name = "colocated"

    def __init__(self, communicator: Communicator, memories: Sequence[OpenedMemory]) -> None:
        self._comm = communicator
        self._memories = memories
        self._sources: tuple[str, dict[int, Packer]] = ("", {})

    def run(self, job: TransferJob) -> TransferStats:
        """Copy this rank's messages, then check them against the headers: see Transport."""
        mine = messages_for(job.plan, job.participants, self._comm.rank)
        begins = {source: self._receive(1, source, _SIGNAL_TAG) for source in sorted({m.src for m in mine})}
        heads = [self._receive(HEADER_BYTES, message.src, message.sequence) for message in mine]
        job.wait(self._comm, [(pending, source) for source, (_, pending) in begins.items()])
        for message in mine:
            self._copy(job, message)
        wait_for_stream(job.packer.device)  # "done" says that the memory was read
        stats = TransferStats()
        for message, (head, pending) in zip(mine, heads, strict=True):
            job.wait(self._comm, [(pending, message.src)])
            stats.accept(job, message, head)
        done = torch.ones(1, dtype=torch.uint8)
        job.wait(self._comm, [(self._comm.send(done, source, _SIGNAL_TAG), source) for source in begins])
        return stats

    def _receive(self, size: int, source: int, tag: int) -> tuple[torch.Tensor, Pending]:
        buffer = torch.empty(size, dtype=torch.uint8)
        return buffer, self._comm.receive(buffer, source, tag)

    def _copy(self, job: TransferJob, message: Message) -> None:
        source = self._source(job, message.src)
        for theirs, ours in zip(source.segments(message), job.packer.segments(message), strict=True):
            for from_, to in zip(theirs.blocks, ours.blocks, strict=True):
                to.values.copy_(from_.values)

    def _source(self, job: TransferJob, rank: int) -> Packer:
        if self._sources[0] != job.plan.digest:
            self._sources = (job.plan.digest, {})
        sources = self._sources[1]
        if rank not in sources:
            layout: Layout = next(iter(job.plan.plans.values())).source
            memory = self._memories[rank]
            tensors = {
                name: memory.parameter(name, shape, job.packer.dtype)
                for name, shape in layout.parameters_of(rank).items()
            }
            sources[rank] = Packer(layout, tensors, "src")
        return sources[rank]

    def close(self) -> None:
        """Release the mappings."""
        self._sources = ("", {})
        self._memories = ()


def all_messages(plan: RoundPlan) -> list[Message]:
    """Return every message of the round, by sequence."""
    return [message for messages in plan.messages.values() for message in messages]


def offers_of(plan: RoundPlan, participants: Participants, rank: int) -> list[tuple[Message, list[int]]]:
    """Return the messages that trainer rank `rank` offers, in order, each with the communicator ranks that read it."""
    offers = []
    for parallel, names in participants.chains().items():
        firsts = [participants.first_rank[name] for name in names]
        offers += [(m, [first + m.dst for first in firsts]) for m in plan.messages[parallel] if m.src == rank]
    return offers


def messages_for(plan: RoundPlan, participants: Participants, rank: int) -> list[Message]:
    """Return the messages that receiver `rank` (of the communicator) reads, in order."""
    replica, tensor_rank = participants.slots[rank].rsplit("/", 1)
    return [m for m in plan.messages[participants.replicas[replica]] if m.dst == int(tensor_rank)]
