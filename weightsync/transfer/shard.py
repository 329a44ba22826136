"""The shard of one rank: its tensors, their layout, and memory for a version that is not served yet."""

from collections.abc import Mapping, Sequence

import torch

from servicekit.errors import DigestMismatch
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
        self._elements = self.layout.elements_of(self.rank)
        self._coverage, self._spare = Coverage(self.layout, self.rank, slot), SpareShard(self.tensors)

    @property
    def is_receiver(self) -> bool:
        """Whether it is a replica's shard."""
        return self.side != "trainer"

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
        return self.packers.get(tensors, self.wire_dtype(round_))

    def check(self, *, staged: bool) -> None:
        """Raise ConfigError if the layout does not fit the engine, or if there is no room for a second version."""
        self._coverage.check(self.tensors)
        if staged and self.is_receiver:
            self._spare.reserve(self.slot)

    def memory(self, *, staged: bool) -> Tensors:
        """Return the memory that a round reads or writes here."""
        return self._spare.tensors if staged and self.is_receiver else self.tensors

    def complete(self, written: Tensors) -> None:
        """Fill the padding, which never travels, after the last byte has arrived."""
        if self.is_receiver:
            self._coverage.zero_padding(written)

    def verify(self, written: Tensors, received: Sequence[tuple[Message, bytes]]) -> None:
        """Raise DigestMismatch unless the messages are the whole shard and its bytes are those that were sent."""
        check_complete(received, self._elements)
        wrong = wrong_messages(received, self.packers.get(written, None))
        if wrong:
            names = sorted({self.layout.params[p] for p in wrong[0].ops["dst_param"]})
            raise DigestMismatch(
                f"{self.slot}: {len(wrong)} of {len(received)} messages differ from what the trainer sent; "
                f"the first, {wrong[0].sequence}, holds {', '.join(names[:8])}"
            )

    def install(self, written: Tensors) -> None:
        """Move what was written into the engine's tensors, if it was written to the spare memory."""
        if written is not self.tensors:
            wait_for_device(self.device)
            self._spare.install()
            self.packers.exchange(self.tensors, written)
        wait_for_device(self.device)  # the engine reads on streams of its own

    def read(self, published: PublishedVersion) -> None:
        """Fill the parameters from a version on disk. Raises: ConfigError; DigestMismatch: a file is torn."""
        self._coverage.check(self.tensors)
        packer, stats = self.packers.get(self.tensors, None), TransferStats()
        read_version(published, self.layout, self.rank, packer, stats, READ_BYTES)
        self._coverage.zero_padding(self.tensors)
        check_complete(stats.received, self._elements)
        if wrong_messages(stats.received, packer):
            raise DigestMismatch(f"{self.slot}: the parameters differ from what was read from {published.folder}")
        packer.forget()

    def checksums(self) -> dict[str, str]:
        """Return "dtype:shape:xxh3-128" of every tensor, padding included, by engine name."""
        with on_device(self.device):
            return tensor_checksums(self.tensors)

    def poison(self) -> int:
        """Fill every tensor with NaN (tests of coverage). Returns: the number of tensors."""
        with on_device(self.device):
            return poison_tensors(self.tensors)
