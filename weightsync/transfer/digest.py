"""The header of a message: its plan, version and sequence, and the digest of its payload."""

import struct
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from servicekit.errors import DigestMismatch
from weightsync.transfer.tensors import memory_of

MAGIC = b"TANDEMW1"
# magic, plan digest, policy version, sequence, payload bytes, payload digest; padded to 64 bytes, so that a payload
# behind it is aligned for every dtype
_HEADER = struct.Struct("<8s16sQIxxxxQ16s")
HEADER_BYTES = 64

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a receiver checks before it accepts a message. It follows the payload, so that hashing delays no byte."""

    plan_digest: str
    policy_version: int
    sequence: int
    payload_bytes: int
    payload_digest: bytes


class PayloadDigest:
    """A position-sensitive 128-bit digest of a payload, part by part.

    On CPUs it is xxh3-128 of the bytes, however they are cut into parts. On GPUs, where xxh3 would need a copy to the
    host, it is two sums over mixed 64-bit words: there both ends must cut alike.
    """

    def __init__(self) -> None:
        self._bytes = xxhash.xxh3_128()
        self._words: WordSums | None = None

    def update(self, part: torch.Tensor) -> None:
        """Add a part (contiguous uint8)."""
        if part.device.type == "cpu":
            self._bytes.update(memory_of(part))
            return
        if self._words is None:
            self._words = WordSums()
        self._words.update(part)

    def digest(self) -> bytes:
        """Return the 16 bytes of the digest."""
        return self._bytes.digest() if self._words is None else self._words.digest()


class WordSums:
    """A digest in plain tensor operations, for devices that xxhash cannot read.

    Each 64-bit word is mixed with its position, and two sums (one weighted by position) are kept modulo 2^64: equal
    words at other places, and swapped ones, change both.
    """

    CHUNK_BYTES = 32 * 2**20  # bounds the temporaries, which are about five times as large

    def __init__(self) -> None:
        self._words = 0
        self._sums: torch.Tensor | None = None

    def update(self, part: torch.Tensor) -> None:
        """Add a part (contiguous uint8); it begins at a new word."""
        for begin in range(0, part.numel(), self.CHUNK_BYTES):
            self._add(part[begin : begin + self.CHUNK_BYTES])

    def _add(self, chunk: torch.Tensor) -> None:
        words = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8)).clone().view(torch.int64)
        place = torch.arange(self._words, self._words + words.numel(), device=chunk.device)
        self._words += words.numel()
        mixed = (words ^ (place * -7046029254386353131)) * -4417276706812531889
        mixed = (mixed ^ (mixed >> 29)) * 1609587929392839161
        mixed ^= mixed >> 32
        sums = torch.stack([mixed.sum(), (mixed * (2 * place + 1)).sum()])
        self._sums = sums if self._sums is None else self._sums + sums

    def digest(self) -> bytes:
        """Return the 16 bytes of the digest."""
        sums = [0, 0] if self._sums is None else self._sums.tolist()
        return struct.pack("<qq", *sums)


def write_header(buffer: Bytes, header: Header) -> None:
    """Write a header into the first HEADER_BYTES of a buffer."""
    packed = _HEADER.pack(
        MAGIC,
        bytes.fromhex(header.plan_digest),
        header.policy_version,
        header.sequence,
        header.payload_bytes,
        header.payload_digest,
    )
    buffer[:HEADER_BYTES] = 0
    buffer[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)


def read_header(buffer: Bytes) -> Header:
    """Read a header. Raises: DigestMismatch: it is not a Tandem message."""
    magic, plan, version, sequence, size, digest = _HEADER.unpack(buffer[: _HEADER.size].tobytes())
    if magic != MAGIC:
        raise DigestMismatch(f"a message does not begin with {MAGIC!r}: {magic!r}")
    return Header(
        plan_digest=plan.hex(),
        policy_version=version,
        sequence=sequence,
        payload_bytes=size,
        payload_digest=digest,
    )


def check_header(got: Header, expected: Header) -> None:
    """Raise DigestMismatch, naming the field, if the header differs from what the plan says."""
    for field in fields(Header):
        found, wanted = getattr(got, field.name), getattr(expected, field.name)
        if found != wanted:
            raise DigestMismatch(f"message {expected.sequence}: {field.name} is {found}, expected {wanted}")
