"""Where the sequences of a packed row lie, in megatron-core's form and for our core attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from trainer_service.megatron_engine.attention.rotary import Rotation
from trainer_service.micro_batches.packed import PackedRow
from trainer_service.micro_batches.samples import IntArray


@dataclass(kw_only=True)
class RowPacking(PackedSeqParams):
    """mcore's parameters of a packed row, and the same as plain numbers, which no kernel must be waited for to read.

    Attributes:
        runs: [(n, L, K)]: n sequences of L tokens each follow one another, which attend to K tokens each, their own
            being the last; L and K with padding.
        keys: indices of the tokens that are attended to, sequence after sequence, in the rows of all context-parallel
            ranks, one after the other; None: each sequence attends to its own tokens only.
        rotation: of queries and keys; None: they are used as they are.
    """

    runs: tuple[tuple[int, int, int], ...]
    keys: Tensor | None
    rotation: Rotation | None = None

    @classmethod
    def of(cls, batch: PackedRow, device: torch.device) -> "RowPacking":
        """Describe a row."""
        ends = _ends(batch.lengths, device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends if batch.keys is None else _ends(batch.attended, device),
            max_seqlen_q=int(batch.lengths.max()),
            max_seqlen_kv=int(batch.attended.max()),
            runs=_runs(list(zip(batch.lengths.tolist(), batch.attended.tolist(), strict=True))),
            keys=None if batch.keys is None else torch.from_numpy(batch.keys).to(device, non_blocking=True),
        )


def _ends(lengths: IntArray, device: torch.device) -> Tensor:
    """Return where each sequence begins, and the last one ends, int32."""
    return torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32)).to(device, non_blocking=True)


def _runs(sequences: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((len(list(same)), *sizes) for sizes, same in groupby(sequences))
