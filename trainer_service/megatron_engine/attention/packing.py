"""Where the sequences of a packed row lie, in megatron-core's form and for our core attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from trainer_service.megatron_engine.attention.rotary import Rotation


@dataclass(kw_only=True)
class RowPacking(PackedSeqParams):
    """mcore's parameters of a packed row, and the same as plain numbers, which no kernel must be waited for to read.

    Attributes:
        runs: [(n, L)]: n sequences of L tokens each follow one another; L with padding, and of all context ranks.
        rotation: of queries and keys; None: they are used as they are.
    """

    runs: tuple[tuple[int, int], ...]
    rotation: Rotation | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "RowPacking":
        """Describe a row.

        Args:
            lengths: tokens of each sequence, on all context ranks.
        """
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = ends.to(device, non_blocking=True)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            runs=tuple((len(list(same)), length) for length, same in groupby(lengths)),
        )


def cut_runs(row: Tensor, runs: Sequence[tuple[int, int]], share: int = 1) -> list[Tensor]:
    """Cut a row [T, heads, head_dim] into its runs, each [n, heads, L / share, head_dim], without a copy.

    Args:
        share: ranks that share each sequence.
    """
    sizes = [count * length // share for count, length in runs]
    return [
        part.unflatten(0, (count, length // share)).transpose(1, 2)
        for part, (count, length) in zip(row.split(sizes), runs, strict=True)
    ]
