"""The header of a message: what it is, which round it belongs to, and the digest of its payload."""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from servicekit.errors import DigestMismatch

MAGIC = b"TANDEMW1"
# magic, plan digest, policy version, sequence, payload bytes, payload digest; padded to 64 bytes, so that a payload
# behind it is aligned for every dtype
_HEADER = struct.Struct("<8s16sQIxxxxQ16s")
HEADER_BYTES = 64

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a receiver checks before it believes a message."""

    plan_digest: str
    policy_version: int
    sequence: int
    payload_bytes: int
    payload_digest: bytes


def payload_digest(payload: Bytes) -> bytes:
    """xxh3-128 of the payload: position-sensitive."""
    return xxhash.xxh3_128(payload.data).digest()


def write_header(buffer: Bytes, header: Header) -> None:
    """Fills the first HEADER_BYTES of a buffer."""
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
    """Reads a header. Raises: DigestMismatch: no Tandem message."""
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


def check_header(got: Header, *, plan_digest: str, policy_version: int, sequence: int, payload_bytes: int) -> None:
    """Raises: DigestMismatch: a field differs from what the plan says, by name."""
    for field, expected in (
        ("plan_digest", plan_digest),
        ("policy_version", policy_version),
        ("sequence", sequence),
        ("payload_bytes", payload_bytes),
    ):
        if getattr(got, field) != expected:
            raise DigestMismatch(f"message {sequence}: {field} is {getattr(got, field)}, expected {expected}")
