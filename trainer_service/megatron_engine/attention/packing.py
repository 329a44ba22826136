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


@dataclass(kw_only=True)
class RowPacking(PackedSeqParams):
    """mcore's parameters of a packed row, and the same as plain numbers, which no kernel must be waited for to read.

    mcore's rotary embeddings read `cu_seqlens_*_padded`, which are on the host. They get an angle for each token of the
    row (PolicyModel takes it by `token_positions`), so the row is one sequence to them; but under context parallelism
    they take a rank's two chunks of each sequence. `max_seqlen_*` bound the positions of which there are angles.

    Attributes:
        runs: [(n, L, K)]: n sequences of L tokens each follow one another, which attend to K tokens each, their own
            being the last; L and K with padding, and of all context ranks.
        token_positions: [T] on the device: the place of each token in its sample, of all context ranks.
        keys: indices in the row of the tokens that are attended to, sequence after sequence; None: the row itself.
    """

    runs: tuple[tuple[int, int, int], ...]
    token_positions: Tensor
    keys: Tensor | None

    @classmethod
    def of(cls, batch: Packed, device: torch.device) -> "RowPacking":
        """Describe a row."""
        lengths, prefixes = batch.lengths, batch.prefix_lengths
        attended = lengths + prefixes
        positions = span_indices(prefixes, lengths)
        ends, key_ends = _ends(lengths), _ends(attended)
        shared = bool(prefixes.any())
        # of all context ranks: more tokens than in this rank's row
        rotated = ends if batch.input_ids.size < int(ends[-1]) else ends[[0, -1]]
        there = ends.to(device, non_blocking=True)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=there,
            cu_seqlens_kv=key_ends.to(device, non_blocking=True) if shared else there,
            cu_seqlens_q_padded=rotated,
            cu_seqlens_kv_padded=rotated,
            max_seqlen_q=int(lengths.max()),
            max_seqlen_kv=int(attended.max()),
            runs=_runs(list(zip(lengths.tolist(), attended.tolist(), strict=True))),
            token_positions=torch.from_numpy(positions).to(device, non_blocking=True),
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


def _ends(lengths: IntArray) -> Tensor:
    """Return where each sequence begins, and the last one ends: int32, on the host."""
    return torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32))


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
