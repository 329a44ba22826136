"""Host memory for copies: what torch's allocator takes of the host for it, and that every tensor has its own bytes."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from trainer_service.host_memory import host_bytes, host_like
from trainer_service.step.offload import LockedCopies, _pieces
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import preset


def taken(size: int) -> int:
    """Bytes that torch takes for a page-locked tensor (ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each page-locked tensor that is made; none has memory."""
    sizes, empty = list[int](), torch.empty

    def make(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        sizes.append(size * dtype.itemsize)
        return empty(size, dtype=dtype, device="meta")

    monkeypatch.setattr(torch, "empty", make)
    return sizes


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("qwen2.5-1.5b", 1),
        ("qwen2.5-1.5b", 2),
        ("qwen2.5-7b", 1),
        ("qwen2.5-7b", 2),
        ("qwen2.5-7b", 4),
        ("qwen3-32b", 8),
    ],
)
@pytest.mark.parametrize("widths", [(4, 4, 4), (2,), (2, 4, 4, 4)], ids=["undo", "reference", "checkpoint"])
def test_the_host_gives_little_more_than_what_is_copied(
    asked: list[int], model: str, tensor: int, widths: tuple[int, ...]
) -> None:
    shapes = megatron_layout(preset(model), Parallel(tensor=tensor)).parameters_of(0).values()
    sizes = [width * math.prod(shape) for shape in shapes for width in widths]
    assert sum(map(taken, sizes)) > 1.05 * sum(sizes)  # one by one
    assert [len(each) for each in host_bytes(sizes, locked=True)] == sizes
    assert sum(map(taken, asked)) <= 1.01 * sum(sizes)


def test_a_storage_with_all_parameters_takes_no_more(asked: list[int]) -> None:
    """As under ZeRO-1."""
    LockedCopies([3_808_192_512, 0, 1])
    assert sum(map(taken, asked)) <= 1.01 * 3_808_192_512


def test_every_tensor_has_its_own_bytes() -> None:
    random = np.random.default_rng(0)
    kinds: list[Any] = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]
    like = [
        torch.empty(tuple(random.integers(0, 40, random.integers(0, 4))), dtype=kinds[random.integers(4)])
        for _ in range(200)
    ]
    made = host_like(like)
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(made))
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in like]
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 for tensor in made)


@pytest.mark.parametrize("size", [0, 1, 2**26 - 1, 2**26, 2**26 + 1, 5 * 2**26 + 7, 2**60 + 2**26])
def test_a_storage_is_cut_into_powers_of_two(size: int) -> None:
    *powers, rest = _pieces(size)
    assert sum(powers) + rest == size
    assert rest < 2**26
    assert all(taken(power) == power for power in powers)
