"""Causal core attention within the sequences of a packed row; needs torch only.

Legend: T tokens of the row on this rank, L tokens of a sequence with its padding, n sequences of one length.

Padding follows all real tokens of its sequence, so the causal mask alone excludes it from all results that are used.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from trainer_service.megatron_engine.attention.copies import with_copies
from trainer_service.megatron_engine.attention.packing import RowPacking, cut_runs

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

# What torch's flash attention computes: type, compute capability, and the size and multiple of head_dim.
_FLASH_TYPES = (torch.float16, torch.bfloat16)
_FLASH_CAPABILITY, _FLASH_HEAD_DIM, _FLASH_MULTIPLE = (8, 0), 256, 8


class PackedAttention(MegatronModule):
    """Attends within each sequence: all of them in one kernel where it exists, else those of one length together.

    A completion that shares its prompt attends to a copy of the prompt's keys and values, followed by its own; autograd
    adds the gradients of all copies up. Queries and keys come without rotary embeddings, which are applied here.

    Under context parallelism a rank has two chunks of each sequence (see packed.context_share): it gathers the keys
    and values of all ranks and attends with its own queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: RowPacking,
        **_: Any,
    ) -> Tensor:
        """Attend: query [T, heads, head_dim], key and value [T, groups, head_dim] -> [T, heads * head_dim]."""
        if packed_seq_params.rotation is not None:
            query, key = (packed_seq_params.rotation.apply(x) for x in (query, key))
        if self.config.context_parallel_size > 1:
            out = self._share(query, key, value, packed_seq_params)
        elif has_kernel(query):
            out = self._in_one_kernel(query, key, value, packed_seq_params)
        else:
            out = self._by_length(query, key, value, packed_seq_params)
        return out.flatten(1)

    def _in_one_kernel(self, query: Tensor, key: Tensor, value: Tensor, packing: RowPacking) -> Tensor:
        def attend(keys: Tensor, values: Tensor) -> Tensor:
            out: Tensor = varlen_attn(
                query,
                keys,
                values,
                packing.cu_seqlens_q,
                packing.cu_seqlens_kv,
                packing.max_seqlen_q,
                packing.max_seqlen_kv,
                scale=self.softmax_scale,
                window_size=(-1, 0),  # causal; the last query is that of the last key
                enable_gqa=query.shape[1] != keys.shape[1],
            )
            return out

        return attend(key, value) if packing.keys is None else with_copies(key, value, packing.keys, attend)

    def _by_length(self, query: Tensor, key: Tensor, value: Tensor, packing: RowPacking) -> Tensor:
        out = []
        cut = (cut_runs(row, packing.query_runs) for row in (query, key, value))
        for q, k, v, run, index in zip(*cut, packing.key_runs, packing.keys_of_runs, strict=True):
            if index is None:
                out.append(self._attend(q, k, v, None))
            else:
                out.append(self._attend_after(q, key, value, run, index))
        return _joined(out)

    def _attend_after(self, query: Tensor, key: Tensor, value: Tensor, run: tuple[int, int], index: Tensor) -> Tensor:
        """Attend with a run of completions, each to its prompt and itself: key and value are the whole row's."""
        mask = _causal_after(query.shape[2], run[1], query.device)

        def attend(*copies: Tensor) -> Tensor:
            keys, values = (cut_runs(copy, [run])[0] for copy in copies)
            return self._attend(query, keys, values, mask)

        return with_copies(key, value, index, attend)

    def _share(self, query: Tensor, key: Tensor, value: Tensor, packing: RowPacking) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
        out = []
        queries = cut_runs(query, packing.query_runs, group.size())
        keys, values = (_cut_gathered(row, packing, group.size()) for row in (key, value))
        for q, k, v in zip(queries, keys, values, strict=True):
            mask = _causal_over_ranks(q.shape[2], group.rank(), group.size(), q.device)
            out.append(self._attend(q, k, v, mask))
        return _joined(out)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def has_kernel(query: Tensor) -> bool:
    """Return whether torch's flash attention for sequences of different lengths can take these queries."""
    head_dim = query.shape[-1]
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in _FLASH_TYPES
        and head_dim <= _FLASH_HEAD_DIM
        and head_dim % _FLASH_MULTIPLE == 0
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    )


@lru_cache(maxsize=256)  # the layers of a micro-batch ask for the same ones
def _causal_after(queries: int, keys: int, device: torch.device) -> Tensor:
    """Make the mask of the last `queries` of `keys` tokens, [queries, keys] bool: each attends to those before it."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)


def _joined(runs: list[Tensor]) -> Tensor:
    """Put runs [n, heads, L, head_dim] one after the other: [T, heads, head_dim]."""
    parts = [run.transpose(1, 2).flatten(0, 1) for run in runs]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _cut_gathered(row: Tensor, packing: RowPacking, size: int) -> list[Tensor]:
    """Cut all ranks' rows [size * T, heads, head_dim] into runs [n, heads, L, head_dim], L in the ranks' order."""
    by_rank = [cut_runs(part, packing.query_runs, size) for part in row.chunk(size)]
    return [torch.cat(parts, 2) for parts in zip(*by_rank, strict=True)]


@lru_cache(maxsize=64)  # the layers of a micro-batch ask for the same ones
def _causal_over_ranks(tokens: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Make the mask of all ranks' keys for this rank's queries, [tokens, tokens * size] bool."""
    columns = torch.stack([_columns_of(tokens, other, size, device) for other in range(size)])
    return columns[rank][:, None] >= columns.flatten()[None]


def _columns_of(tokens: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Return a context-parallel rank's tokens of a sequence, [tokens]: chunks `rank` and `2 * size - 1 - rank`."""
    half = tokens // 2
    within = torch.arange(half, device=device)
    return torch.cat([within + rank * half, within + (2 * size - 1 - rank) * half])
