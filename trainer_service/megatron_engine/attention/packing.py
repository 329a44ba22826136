"""Where the sequences of a packed row lie, in megatron-core's form and for our core attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from trainer_service.batch.packed import Packed
from trainer_service.batch.samples import IntArray, span_indices, starts
from trainer_service.megatron_engine.attention.rotary import Rotation


@dataclass(kw_only=True)
class RowPacking(PackedSeqParams):
    """mcore's parameters of a packed row, and the same as plain numbers, which no kernel must be waited for to read.

    Attributes:
        runs: [(n, L, K)]: n sequences of L tokens each follow one another, which attend to K tokens each, their own
            being the last; L and K with padding, and of all context ranks.
        keys: indices in the row of the tokens that are attended to, sequence after sequence; None: the row itself.
        rotation: of queries and keys; None: they are used as they are.
    """

    runs: tuple[tuple[int, int, int], ...]
    keys: Tensor | None
    rotation: Rotation | None = None

    @classmethod
    def of(cls, batch: Packed, device: torch.device) -> "RowPacking":
        """Describe a row."""
        lengths, attended = batch.lengths, batch.lengths + batch.prefix_lengths
        shared = bool(batch.prefix_lengths.any())
        ends = _ends(lengths, device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=_ends(attended, device) if shared else ends,
            max_seqlen_q=int(lengths.max()),
            max_seqlen_kv=int(attended.max()),
            runs=_runs(list(zip(lengths.tolist(), attended.tolist(), strict=True))),
            keys=torch.from_numpy(_keys(batch)).to(device, non_blocking=True) if shared else None,
        )

    @property
    def query_runs(self) -> list[tuple[int, int]]:
        """Number and tokens of the sequences of each run."""
        return [(count, length) for count, length, _ in self.runs]

    @property
    def key_runs(self) -> list[tuple[int, int]]:
        """Number of sequences of each run, and of the tokens that each of them attends to."""
        return [(count, attended) for count, _, attended in self.runs]

    @property
    def keys_of_runs(self) -> list[Tensor | None]:
        """Part of `keys` of each run; None: its sequences attend to their own tokens only."""
        if self.keys is None:
            return [None] * len(self.runs)
        parts = self.keys.split([count * attended for count, attended in self.key_runs])
        own = [length == attended for _, length, attended in self.runs]
        return [None if alone else part for part, alone in zip(parts, own, strict=True)]


def _ends(lengths: IntArray, device: torch.device) -> Tensor:
    """Return where each sequence begins, and the last one ends, int32."""
    return torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32)).to(device, non_blocking=True)


def _keys(batch: Packed) -> IntArray:
    """Return the indices in the row of each sequence's prefix and of its own tokens."""
    first = np.stack([batch.prefix_starts, starts(batch.lengths)], 1)
    return span_indices(first.ravel(), np.stack([batch.prefix_lengths, batch.lengths], 1).ravel())


def _runs(sequences: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((len(list(same)), *sizes) for sizes, same in groupby(sequences))


def cut_runs(row: Tensor, runs: Sequence[tuple[int, int]], share: int = 1) -> list[Tensor]:
    """Cut a row [T, heads, head_dim] into its runs, each [n, heads, L / share, head_dim], without a copy.

    Args:
        runs: [(n, L)].
        share: ranks that share each sequence.
    """
    sizes = [count * length // share for count, length in runs]
    return [
        part.unflatten(0, (count, length // share)).transpose(1, 2)
        for part, (count, length) in zip(row.split(sizes), runs, strict=True)
    ]
