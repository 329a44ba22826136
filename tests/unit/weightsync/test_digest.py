"""Digests are sensitive to every byte and its place, on CPUs and on devices that xxhash cannot read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from servicekit.errors import DigestMismatch
from weightsync.transfer.digest import (
    HEADER_BYTES,
    Header,
    PayloadDigest,
    WordSums,
    check_header,
    read_header,
    write_header,
)

HEADER = Header(
    plan_digest="ab" * 16, policy_version=2**40, sequence=7, payload_bytes=2**33, payload_digest=bytes(range(16))
)


def payload(num_bytes: int = 1000) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def word_sums(*parts: torch.Tensor) -> bytes:
    digest = WordSums()
    for part in parts:
        digest.update(part)
    return digest.digest()


def xxh(*parts: torch.Tensor) -> bytes:
    digest = PayloadDigest()
    for part in parts:
        digest.update(part)
    return digest.digest()


@pytest.mark.parametrize("digest", [word_sums, xxh])
def test_every_flipped_bit_changes_it(digest) -> None:  # type: ignore[no-untyped-def]
    data = payload(64)
    seen = {digest(data)}
    for position in range(64):
        for bit in range(8):
            changed = data.clone()
            changed[position] ^= 1 << bit
            seen.add(digest(changed))
    assert len(seen) == 1 + 64 * 8


@pytest.mark.parametrize("digest", [word_sums, xxh])
def test_swapped_words_change_it(digest) -> None:  # type: ignore[no-untyped-def]
    data = payload(1024)
    swapped = torch.cat([data[:8], data[512:520], data[16:512], data[8:16], data[520:]])
    assert digest(data) != digest(swapped)
    assert digest(torch.zeros(64, dtype=torch.uint8)) != digest(torch.zeros(72, dtype=torch.uint8))


def test_xxh3_does_not_see_how_it_is_cut() -> None:
    data = payload()
    assert xxh(data) == xxh(data[:3], data[3:500], data[500:])


def test_word_sums_do_not_see_the_chunks_they_work_in(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = word_sums(payload(4096))
    monkeypatch.setattr(WordSums, "CHUNK_BYTES", 64)
    assert word_sums(payload(4096)) == whole


def test_a_header_comes_back() -> None:
    buffer = np.ones(HEADER_BYTES, dtype=np.uint8)
    write_header(buffer, HEADER)
    assert read_header(buffer) == HEADER


def test_what_is_no_header_is_refused() -> None:
    with pytest.raises(DigestMismatch, match="TANDEMW1"):
        read_header(np.zeros(HEADER_BYTES, dtype=np.uint8))


@pytest.mark.parametrize(
    ("field", "value"),
    [("plan_digest", "cd" * 16), ("policy_version", 3), ("sequence", 8), ("payload_bytes", 5)],
)
def test_a_header_of_something_else_is_refused_by_field(field: str, value: Any) -> None:
    check_header(HEADER, HEADER)
    with pytest.raises(DigestMismatch, match=field):
        check_header(HEADER, replace(HEADER, **{field: value}))
