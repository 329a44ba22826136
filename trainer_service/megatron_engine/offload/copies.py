"""Where a state's bytes are while its own memory is free: page-locked memory with a GPU, a file without one.

Where the host is the device, memory of the host would free nothing: bytes go to a file of the run's folder that has no
name, so that nothing of it stays after a crash. Both are reserved at the start, before anything expensive; a step
cannot find too little room later.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from servicekit.errors import ConfigError
from trainer_service.host_memory import host_bytes
from weightsync.transfer.tensors import memory_of

GIB = 2**30
# Bytes of a storage that need not fit a power of two: they find room next to others.
_REST = 2**26


class Copies(Protocol):
    """A copy of each storage of a list, which has its place from the beginning."""

    def store(self, number: int, storage: UntypedStorage) -> None:
        """Copy a storage to its place. Raises: OSError: it cannot be written."""

    def load(self, number: int, storage: UntypedStorage) -> None:
        """Copy its bytes back into a storage, which has its size again. Raises: OSError: they cannot be read."""


class LockedCopies:
    """Copies in host memory, page-locked, so that a GPU copies at full speed. The caller waits for the GPU.

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
    """Copies in one file without a name."""

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

    def _transfer(self, number: int, storage: UntypedStorage, some: "_Some") -> None:
        """Move all bytes; Linux moves at most 2 GiB in a call."""
        left, begin = memory_of(bytes_of(storage)), self._begins[number]
        while len(left) > 0:
            moved = some(self._file.fileno(), left, begin)
            if moved == 0:
                raise OSError(f"the file of offloaded memory ends at byte {begin}")
            left, begin = left[moved:], begin + moved


class _Some(Protocol):
    """Moves some bytes between a file and memory."""

    def __call__(self, file: int, part: memoryview, begin: int, /) -> int:
        """Return how many."""


def copies_for(what: str, sizes: Sequence[int], device: torch.device, folder: Path | None) -> Copies:
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
