"""The shard of one rank: its tensors, their layout, and memory for a version that is not served yet."""

from collections.abc import Mapping, Sequence

import torch

from servicekit.errors import DigestMismatch, NotReady
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.layouts.layout import Parallel
from weightsync.layouts.registry import ROLLOUT_ENGINE, TRAINER_ENGINE, layout_of
from weightsync.model.megatron_names import in_local_spelling
from weightsync.model.spec import ModelSpec
from weightsync.plans.messages import Message
from weightsync.plans.round_plan import source_layout
from weightsync.transfer.coverage import Coverage
from weightsync.transfer.devices import on_device, wait_for_device
from weightsync.transfer.spare import SpareShard
from weightsync.transfer.tensors import poison_tensors, tensor_checksums, wire_dtype
from weightsync.transfer.transports.disk import read_version
from weightsync.transfer.transports.disk_files import PublishedVersion
from weightsync.transfer.transports.packing import Packer, Packers
from weightsync.transfer.transports.transport import TransferStats, check_complete, wrong_messages

READ_BYTES = 32 * 2**20

Tensors = Mapping[str, torch.Tensor]


class OwnShard:
    """A rank's part of the weights, as the trainer or as a receiver.

    Args:
        slot: "trainer/<rank>" or "<replica>/<tp rank>".
        parallel: sizes of this process's own side.
        tensors: parameters (and persistent buffers) by engine name (Megatron's in either spelling): the memory that is
            read or written. A staged round may give them other memory (see SpareShard): they must be the engine's own,
            not aliases of them.
    """

    def __init__(self, *, spec: ModelSpec, slot: str, parallel: Parallel, tensors: Tensors) -> None:
        self.spec, self.slot, self.parallel = spec, slot, parallel
        self.side, _, rank = slot.rpartition("/")
        self.rank = int(rank)
        self.tensors = in_local_spelling(spec, tensors)
        receives = self.is_receiver
        self.usual_engine = ROLLOUT_ENGINE if receives else TRAINER_ENGINE  # where sizes name none
        self.layout = layout_of(ROLLOUT_ENGINE, spec, parallel) if receives else source_layout(spec, parallel)
        self.packers = Packers(self.layout, "dst" if receives else "src")
        self._sending = Packers(self.layout, "src") if receives else self.packers
        # The version that the tensors hold, with the digests of its messages: only then may a replica be a source.
        self._verified: tuple[int, Sequence[tuple[Message, bytes]]] | None = None
        self._elements = self.layout.elements_of(self.rank)
        self._coverage, self._spare = Coverage(self.layout, self.rank, slot), SpareShard(self.tensors)

    @property
    def is_receiver(self) -> bool:
        """Whether it is a replica's shard."""
        return self.side != "trainer"

    def sends(self, round_: pb.Round) -> bool:
        """Whether it is the trainer's, or that of the replica that is the round's source: the round only reads it."""
        return not self.is_receiver or round_.source == self.side

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self.tensors.values())).device

    @property
    def num_bytes(self) -> int:
        """Bytes of the shard without padding."""
        return self._elements * int(self._held.itemsize)

    @property
    def _held(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    def wire_dtype(self, round_: pb.Round) -> torch.dtype:
        """Return the type that a trainer rank sends; for a receiver, the type that it holds."""
        return self._held if self.is_receiver else wire_dtype(round_.wire_dtype, self._held)

    def packer(self, tensors: Tensors, round_: pb.Round) -> Packer:
        """Return the packer of its own or of its spare memory, for this round's wire type."""
        packers = self._sending if self.sends(round_) else self.packers
        return packers.get(tensors, self.wire_dtype(round_))

    def forget_messages(self) -> None:
        """Drop what is kept of an old plan's messages."""
        self.packers.forget()
        self._sending.forget()

    def check(self, round_: pb.Round) -> None:
        """Check that it can take part.

        Raises: ConfigError: the layout does not fit the engine, or there is no room for a second version; NotReady: it
            is the source, and does not hold the round's version, verified.
        """
        self._coverage.check(self.tensors)
        if not self.sends(round_):
            if _is_staged(round_):
                self._spare.reserve(self.slot)
        elif self.is_receiver and (self._verified is None or self._verified[0] != round_.policy_version):
            has = "no verified weights" if self._verified is None else f"version {self._verified[0]}"
            raise NotReady(f"{self.slot} is no source of version {round_.policy_version}: it has {has}")

    def memory(self, round_: pb.Round) -> Tensors:
        """Return the memory that a round reads or writes here. Raises: DigestMismatch: a source's has changed."""
        if self.sends(round_):
            if self.is_receiver and self._verified is not None:
                self._compare(self.tensors, self._verified[1], "what this source has verified itself")
            return self.tensors
        if _is_staged(round_):
            return self._spare.tensors
        self._verified = None
        return self.tensors

    def complete(self, written: Tensors) -> None:
        """Fill the padding of a receiver, which never travels, after the last byte has arrived."""
        self._coverage.zero_padding(written)

    def verify(self, written: Tensors, received: Sequence[tuple[Message, bytes]]) -> None:
        """Raise DigestMismatch unless the messages are the whole shard and its bytes are those that were sent."""
        check_complete(received, self._elements)
        self._compare(written, received, "what was sent")

    def _compare(self, held: Tensors, received: Sequence[tuple[Message, bytes]], with_: str) -> None:
        wrong = wrong_messages(received, self.packers.get(held, None))
        if wrong:
            names = sorted({self.layout.params[p] for p in wrong[0].ops["dst_param"]})
            raise DigestMismatch(
                f"{self.slot}: {len(wrong)} of {len(received)} messages differ from {with_}; "
                f"the first, {wrong[0].sequence}, holds {', '.join(names[:8])}"
            )

    def install(self, written: Tensors, policy_version: int, received: Sequence[tuple[Message, bytes]]) -> None:
        """Move what was written, and verified, into the engine's tensors, if it was written to the spare memory."""
        self._verified = None
        if written is not self.tensors:
            wait_for_device(self.device)
            self._spare.install()
            self.packers.exchange(self.tensors, written)
        wait_for_device(self.device)  # the engine reads on streams of its own
        self._verified = (policy_version, received)

    def read(self, published: PublishedVersion) -> None:
        """Fill the parameters from a version on disk. Raises: ConfigError; DigestMismatch: a file is torn."""
        self._coverage.check(self.tensors)
        self._verified = None
        packer, stats = self.packers.get(self.tensors, None), TransferStats()
        read_version(published, self.layout, self.rank, packer, stats, READ_BYTES)
        self._coverage.zero_padding(self.tensors)
        check_complete(stats.received, self._elements)
        if wrong_messages(stats.received, packer):
            raise DigestMismatch(f"{self.slot}: the parameters differ from what was read from {published.folder}")
        packer.forget()
        self._verified = (published.policy_version, stats.received)

    def checksums(self) -> dict[str, str]:
        """Return "dtype:shape:xxh3-128" of every tensor, padding included, by engine name."""
        with on_device(self.device):
            return tensor_checksums(self.tensors)

    def poison(self) -> int:
        """Fill every tensor with NaN (tests of coverage). Returns: the number of tensors."""
        with on_device(self.device):
            return poison_tensors(self.tensors)


def _is_staged(round_: pb.Round) -> bool:
    return round_.install_mode == pb.INSTALL_MODE_STAGED
