"""Which memory the engine's work needs; it is there during that work only.

| work                           | states                                                                |
|--------------------------------|-----------------------------------------------------------------------|
| a train step                   | parameters, gradients, optimizer; the reference while it is measured  |
| publishing, export, log-probs  | parameters                                                            |
| log-probs of the reference     | reference                                                             |
| writing a checkpoint           | parameters, optimizer, reference                                      |
| reading one, loading the model | the same, which it changes                                            |

A state is a set of storages. Each is resized to 0 bytes and back, as mcore does with its gradient buffers: the storage
itself stays. So every view of it (`parameter.data`, `main_grad`, a bucket, the weight sync's) is valid again when the
bytes are back, wherever they are then. In between nothing may touch the bytes: not even torch notices.

Meanwhile they are in page-locked memory with a GPU, in a file without one. Where the host is the device, memory of the
host would free nothing: bytes go to a file of the run's folder that has no name, so that nothing of it stays after a
crash. Both are reserved at the start, before anything expensive; a step cannot find too little room later.
"""

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

from servicekit.errors import ConfigError, Internal
from servicekit.logs import get_logger
from trainer_service.host_memory import host_bytes
from trainer_service.step.agreement import RankAgreement
from weightsync.transfer.devices import wait_for_device
from weightsync.transfer.tensors import memory_of

log = get_logger(__name__)


class EngineState(StrEnum):
    """A part of the engine's memory, as trainer.offload names it; `reference` goes with the parameters."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    REFERENCE = "reference"


STEP = (EngineState.PARAMETERS, EngineState.GRADIENTS, EngineState.OPTIMIZER)
CHECKPOINT = (EngineState.PARAMETERS, EngineState.OPTIMIZER, EngineState.REFERENCE)


@dataclass(kw_only=True)
class _Memory:
    """The memory of a state.

    Attributes:
        copies: None: its bytes are not kept.
        users: blocks of `Offload.use` that need it now.
        changed: `copies` are older than the memory.
        is_away: whether the bytes are on the host only.
    """

    storages: list[UntypedStorage]
    sizes: list[int]
    copies: "LockedCopies | FileCopies | None"
    is_away: bool = False
    users: int = 0
    changed: bool = True

    def bring(self) -> None:
        """Take the memory again and fill it. Raises: OSError, RuntimeError: there is none; nothing has changed."""
        if not self.is_away:
            return
        try:
            for number, (storage, size) in enumerate(zip(self.storages, self.sizes, strict=True)):
                storage.resize_(size)
                if self.copies is not None:
                    self.copies.load(number, storage)
        except (OSError, RuntimeError):
            self.free()
            raise
        self.is_away = False

    def store(self) -> None:
        """Copy to the host what has changed. Raises: OSError."""
        if self.changed and self.copies is not None:
            for number, storage in enumerate(self.storages):
                self.copies.store(number, storage)
        self.changed = False

    def free(self) -> None:
        """Free the memory, whose bytes are on the host."""
        for storage in self.storages:
            storage.resize_(0)
        self.is_away = True


class Offload:
    """The states that are offloaded; those that are not are always there.

    Args:
        folder: of files that hold a CPU's bytes; None: the folder of temporary files.
    """

    def __init__(self, device: torch.device, folder: Path | None, agreement: RankAgreement) -> None:
        self._device, self._folder, self._agreement = device, folder, agreement
        self._memory: dict[EngineState, _Memory] = {}

    def add(
        self, state: EngineState, tensors: Iterable[Tensor], *, keep: bool = True, beside: Iterable[Tensor] = ()
    ) -> None:
        """Offload a state from the first use on.

        Args:
            tensors: whose storages are the state; those of other devices than this rank's are left out.
            keep: false: its bytes need not come back; the memory has any value then.
            beside: tensors of other states, whose storages are not this one's.
        Raises: ConfigError: the host has no room.
        """
        others = {tensor.untyped_storage()._cdata for tensor in beside}
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        storages = [
            storage
            for key, storage in found.items()
            if key not in others and storage.device.type == self._device.type and storage.nbytes() > 0
        ]
        sizes = [storage.nbytes() for storage in storages]
        copies = copies_for(state, sizes, self._device, self._folder) if keep else None
        self._memory[state] = _Memory(storages=storages, sizes=sizes, copies=copies)
        log.info("offloaded between uses", state=state, bytes=sum(sizes), kept=keep, device=str(self._device))

    def __contains__(self, state: EngineState) -> bool:
        """Whether a state is offloaded."""
        return state in self._memory

    @contextmanager
    def use(self, *states: EngineState, changes: bool = True) -> Iterator[Mapping[str, float]]:
        """Have states in memory inside of a `with` block; every rank must enter it together.

        Blocks may be nested: memory is freed at the end of the outermost that needs it.

        Args:
            changes: whether the block may change them; false saves the copy at its end.
        Yields: seconds by part: `onload`, and `offload` after the block; empty if nothing is offloaded.
        Raises: Internal: on every rank: there is no memory for them, on one at least; nothing has changed.
        """
        needed = [self._memory[state] for state in states if state in self._memory]
        seconds: dict[str, float] = {}
        if not needed:
            yield seconds
            return
        started_s = time.perf_counter()
        self._onload(needed, ", ".join(states))
        seconds["onload"] = time.perf_counter() - started_s
        for memory in needed:
            memory.users += 1
            memory.changed |= changes
        try:
            yield seconds
        finally:
            started_s = time.perf_counter()
            for memory in needed:
                memory.users -= 1
            self._offload([memory for memory in needed if memory.users == 0])
            seconds["offload"] = time.perf_counter() - started_s

    def _onload(self, needed: list[_Memory], names: str) -> None:
        def bring() -> int:
            try:
                for memory in needed:
                    memory.bring()
                wait_for_device(self._device)
            except RuntimeError as error:  # torch's, of a GPU's memory and of a CPU's
                wanted = sum(sum(memory.sizes) for memory in needed)
                raise ConfigError(
                    f"they take {wanted / GIB:.2f} GiB, and so much is not free there: free some (does a rollout still "
                    f"use it?) and repeat; nothing is lost ({error})"
                ) from error
            return 0

        try:
            self._agreement.together(f"bring {names} back to {self._device}", bring)
        except Internal:  # of any rank
            self._offload([memory for memory in needed if memory.users == 0])
            raise

    def _offload(self, unused: list[_Memory]) -> None:
        """Free memory; what cannot be copied stays where it is."""
        if not unused:
            return
        try:
            for memory in unused:
                memory.store()
            wait_for_device(self._device)
        except (OSError, RuntimeError) as error:
            log.error("offload failed: the memory stays in use", device=str(self._device), error=str(error))
            return
        for memory in unused:
            memory.free()
        _give_back(self._device)


def _give_back(device: torch.device) -> None:
    """Make allocators return what is free, because other processes are to have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; another libc returns memory by itself
    if trim is not None:
        trim(0)


GIB = 2**30
# Bytes of a storage that need not fit a power of two: they find room next to others.
_REST = 2**26


class LockedCopies:
    """Copies of storages in host memory, page-locked, so that a GPU copies at full speed. The caller waits for the GPU.

    In pieces of powers of two, as blocks of host memory are: one storage may have all parameters (ZeRO-1).
    """

    def __init__(self, sizes: Sequence[int], *, locked: bool = True) -> None:
        self._pieces = [_pieces(size) for size in sizes]
        memory = iter(host_bytes([size for pieces in self._pieces for size in pieces], locked=locked))
        self._copies = [[next(memory) for _ in pieces] for pieces in self._pieces]

    def store(self, number: int, storage: UntypedStorage) -> None:
        """Begin to copy a storage to its place."""
        for copy, piece in zip(self._copies[number], bytes_of(storage).split(self._pieces[number]), strict=True):
            copy.copy_(piece, non_blocking=True)

    def load(self, number: int, storage: UntypedStorage) -> None:
        """Begin to copy its bytes back."""
        for copy, piece in zip(self._copies[number], bytes_of(storage).split(self._pieces[number]), strict=True):
            piece.copy_(copy, non_blocking=True)


def _pieces(size: int) -> list[int]:
    """Cut a size into powers of two, from _REST on, and a rest."""
    return [2**bit for bit in range(_REST.bit_length() - 1, size.bit_length()) if size & 2**bit] + [size % _REST]


class FileCopies:
    """Copies of storages in one file without a name."""

    def __init__(self, sizes: Sequence[int], folder: Path) -> None:
        self._begins = [sum(sizes[:number]) for number in range(len(sizes))]
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as its object
        os.posix_fallocate(self._file.fileno(), 0, max(1, sum(sizes)))

    def store(self, number: int, storage: UntypedStorage) -> None:
        """Write a storage to its place. Raises: OSError."""
        self._transfer(number, storage, os.pwrite)

    def load(self, number: int, storage: UntypedStorage) -> None:
        """Read its bytes back. Raises: OSError."""
        self._transfer(number, storage, lambda file, part, begin: os.preadv(file, [part], begin))

    def _transfer(self, number: int, storage: UntypedStorage, some: Callable[[int, memoryview, int], int]) -> None:
        """Move all bytes; Linux moves at most 2 GiB in a call."""
        left, begin = memory_of(bytes_of(storage)), self._begins[number]
        while len(left) > 0:
            moved = some(self._file.fileno(), left, begin)
            if moved == 0:
                raise OSError(f"the file of offloaded memory ends at byte {begin}")
            left, begin = left[moved:], begin + moved


def copies_for(what: str, sizes: Sequence[int], device: torch.device, folder: Path | None) -> LockedCopies | FileCopies:
    """Reserve the place of a state's bytes.

    Args:
        what: the state, for errors ("optimizer").
        folder: of the file, for a CPU; None: the folder of temporary files.
    Raises: ConfigError: there is no room.
    """
    needed = f"trainer.offload.{what} needs {sum(sizes) / GIB:.2f} GiB for each rank"
    try:
        if device.type != "cpu":
            return LockedCopies(sizes)
    except RuntimeError as error:
        raise ConfigError(
            f"{needed} of page-locked host memory, which the host does not give ({error}): raise its memory limit, "
            f"or set trainer.offload.{what}: false"
        ) from error
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    try:
        return FileCopies(sizes, folder)
    except OSError as error:
        raise ConfigError(
            f"{needed} in {folder} ({error}): free disk space there, or set trainer.offload.{what}: false"
        ) from error


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return a storage's memory as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
