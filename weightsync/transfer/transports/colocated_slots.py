"""The transport colocated through slots: the trainer packs messages into two slots of shared memory, filled in turn.

For parameters that cannot be exposed themselves: a cast at the source, no room in /dev/shm.
"""

from collections import deque
from collections.abc import Sequence

import torch

from weightsync.plans.messages import Message
from weightsync.transfer.communicators.communicator import Communicator, Pending
from weightsync.transfer.devices import wait_for_stream
from weightsync.transfer.digest import HEADER_BYTES
from weightsync.transfer.transports.colocated import all_messages, messages_for, offers_of
from weightsync.transfer.transports.shared_memory import Exposure, OpenedMemory
from weightsync.transfer.transports.transport import TransferJob, TransferStats, message_digest

SLOTS = 2
WINDOW = 64  # messages whose headers are awaited: 4 KiB


class SlotSource:
    """The trainer's end: it fills the slots."""

    name = "colocated"

    def __init__(self, communicator: Communicator, exposure: Exposure) -> None:
        self._comm = communicator
        self._exposure = exposure
        self._slots = int(exposure.description.slots)
        self._slot_bytes = int(exposure.description.slot_bytes)

    def run(self, job: TransferJob) -> TransferStats:
        """Pack this rank's messages into the slots in turn: see Transport."""
        stats = TransferStats(staging_bytes=self._slots * self._slot_bytes)
        offered: deque[list[tuple[Pending, int]]] = deque()
        for number, (message, readers) in enumerate(offers_of(job.plan, job.participants, self._comm.rank)):
            while len(offered) >= self._slots:
                job.wait(self._comm, offered.popleft())
            offered.append(self._offer(job, message, readers, number))
            stats.num_messages += 1
            stats.bytes_sent += job.packer.payload_bytes(message)
        while offered:
            job.wait(self._comm, offered.popleft())
        return stats

    def _offer(
        self, job: TransferJob, message: Message, readers: Sequence[int], number: int
    ) -> list[tuple[Pending, int]]:
        """Pack a message. Returns: receives of the acknowledgement and sends of the header, each with its peer."""
        begin = number % self._slots * self._slot_bytes
        payload = self._exposure.tensors[0][begin : begin + job.packer.payload_bytes(message)]
        job.packer.pack(message, payload)
        digest = message_digest(job.packer, message, job.packer.split(message, payload))
        head = job.header(message, digest)  # computing the digest has waited for the device: the bytes are written
        works = []
        for reader in readers:
            acknowledgement = torch.empty(1, dtype=torch.uint8)
            works.append((self._comm.receive(acknowledgement, reader, message.sequence), reader))
            works.append((self._comm.send(head, reader, message.sequence), reader))
        return works

    def close(self) -> None:
        """Close the exposure."""
        self._exposure.close()


class SlotReader:
    """A receiver's end: it copies from the slots. memories: the trainer's, by rank."""

    name = "colocated"

    def __init__(self, communicator: Communicator, memories: Sequence[OpenedMemory]) -> None:
        self._comm = communicator
        self._memories = memories
        self._numbers: tuple[str, dict[int, int]] = ("", {})

    def run(self, job: TransferJob) -> TransferStats:
        """Copy this rank's messages from the slots, each after its header: see Transport."""
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
            job.wait(self._comm, [(pending, message.src)])
            stats.accept(job, message, head)
            self._copy(job, message, numbers[message.sequence])
            done = torch.ones(1, dtype=torch.uint8)
            acknowledgements.append((self._comm.send(done, message.src, message.sequence), message.src))
        job.wait(self._comm, acknowledgements)
        return stats

    def _copy(self, job: TransferJob, message: Message, number: int) -> None:
        job.packer.unpack(message, self._memories[message.src].slot(number)[: job.packer.payload_bytes(message)])
        wait_for_stream(job.packer.device)  # the acknowledgement says that the memory was read

    def _numbered(self, job: TransferJob) -> dict[int, int]:
        """Count, for each message, how many its sender has offered before it."""
        if self._numbers[0] != job.plan.digest:
            numbers: dict[int, int] = {}
            offered = [0] * job.participants.trainer.world_size
            for message in all_messages(job.plan):
                numbers[message.sequence] = offered[message.src]
                offered[message.src] += 1
            self._numbers = (job.plan.digest, numbers)
        return self._numbers[1]

    def close(self) -> None:
        """Release the mappings."""
        self._memories = ()
