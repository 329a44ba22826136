"""Host memory for copies of a trainer rank's tensors, page-locked with a GPU: many in a few large blocks.

torch takes page-locked memory in powers of two (ATen/core/CachingHostAllocator.h): a tensor of 129.5 MiB by itself
takes 256 (pytorch issue 150517), the copies of a 7B model 1.9 times their bytes. The blocks here are powers of two.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Where a tensor may begin in a block: as in memory that torch gives to a tensor on a CPU.
_ALIGNMENT = 64


def host_like(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Make a tensor on the host for each, of its shape and type, with any values; page-locked if one is on a GPU."""
    like = list(tensors)
    memory = host_bytes([tensor.nbytes for tensor in like], locked=any(tensor.is_cuda for tensor in like))
    return [own.view(tensor.dtype).view(tensor.shape) for own, tensor in zip(memory, like, strict=True)]


def host_bytes(sizes: Sequence[int], *, locked: bool) -> list[Tensor]:
    """Make a tensor uint8 [size] on the host for each size. Raises: RuntimeError: the host does not give so much."""
    blocks, places = _packed(sizes)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=locked) for size in blocks]
    return [memory[block][begin : begin + size] for (block, begin), size in zip(places, sizes, strict=True)]


def _packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack sizes into blocks of powers of two: the largest first, each into the first block that has room for it.

    A new block is as large as what is left to be packed, rounded down: the last ones take what the first leave.

    Returns: the blocks' sizes; of each size its block, and where it begins there.
    """
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    left, blocks, used = sum(aligned), list[int](), list[int]()
    places = [(0, 0)] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -aligned[number]):
        size = aligned[number]
        block = next((index for index, full in enumerate(used) if blocks[index] - full >= size), len(blocks))
        if block == len(blocks):
            blocks.append(max(_power_of_two(size), _power_of_two(left + 1) // 2))
            used.append(0)
        places[number] = (block, used[block])
        used[block] += size
        left -= size
    return blocks, places


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is not less than a size; 0 of 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
