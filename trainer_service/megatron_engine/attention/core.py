"""Causal core attention within the sequences of a packed row; needs torch only.

Legend: T tokens of the row on this rank; n sequences of L tokens with their padding, which attend to K tokens each.

Padding follows all real tokens of its sequence, so the causal mask alone excludes it from all results that are used.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from servicekit.logs import get_logger
from trainer_service.megatron_engine.attention.copies import with_copies
from trainer_service.megatron_engine.attention.packing import RowPacking

varlen_attn: Any = None
if torch.cuda.is_available():  # the import takes 0.9 s of the 4.8 s of a rank's imports
    with contextlib.suppress(ImportError):  # before torch 2.10
        from torch.nn.attention import varlen

        varlen_attn = varlen.varlen_attn

# What torch's flash attention computes: type, compute capability, and the size and multiple of head_dim.
_FLASH_TYPES = (torch.float16, torch.bfloat16)
_FLASH_CAPABILITY, _FLASH_HEAD_DIM, _FLASH_MULTIPLE = (8, 0), 256, 8

log = get_logger(__name__)


class PackedAttention(MegatronModule):
    """Attends within each sequence: all of them in one kernel where it exists, else those of one length together.

    A completion that shares its prompt attends to a copy of the prompt's keys and values, followed by its own; autograd
    adds the gradients of all copies up. Queries and keys come without rotary embeddings, which are applied here.

    Under context parallelism a rank has two chunks of each sequence (see packed.context_share): it gathers the keys
    and values of all ranks, and each chunk attends to a copy of those up to its end.
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
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
        return self.attend(query, key, value, packed_seq_params).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: RowPacking) -> Tensor:
        """Attend with this rank's queries to keys and values of all context-parallel ranks: -> as the queries."""
        kernel = has_kernel(query)
        attend = partial(self._in_one_kernel if kernel else self._by_length, query, packing)
        keys_of_runs = [count * attended for count, _, attended in packing.runs]

        def cut(row: Tensor) -> Sequence[Tensor]:
            return [row] if kernel else row.split(keys_of_runs)

        if packing.keys is None:
            return attend(cut(key), cut(value))
        return with_copies(key, value, cut(packing.keys), attend)

    def _in_one_kernel(
        self, query: Tensor, packing: RowPacking, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """Attend with all sequences; keys and values: one tensor of all of theirs."""
        out: Tensor = varlen_attn(
            query,
            keys[0],
            values[0],
            packing.cu_seqlens_q,
            packing.cu_seqlens_kv,
            packing.max_seqlen_q,
            packing.max_seqlen_kv,
            scale=self.softmax_scale,
            window_size=(-1, 0),  # causal; the last query is that of the last key
            enable_gqa=query.shape[1] != keys[0].shape[1],
        )
        return out

    def _by_length(
        self, query: Tensor, packing: RowPacking, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """Attend with the sequences of a run together; keys and values: of each run."""
        out = []
        queries = query.split([count * length for count, length, _ in packing.runs])
        for *rows, (count, length, attended) in zip(queries, keys, values, packing.runs, strict=True):
            q, k, v = (row.unflatten(0, (count, -1)).transpose(1, 2) for row in rows)  # [n, heads, L or K, head_dim]
            mask = None if length == attended else _causal_after(length, attended, query.device)
            out.append(self._attend(q, k, v, mask).transpose(1, 2).flatten(0, 1))
        return torch.cat(out) if len(out) > 1 else out[0]

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
        query.is_cuda
        and varlen_attn is not None
        and _takes_our_arguments(varlen_attn)
        and query.dtype in _FLASH_TYPES
        and head_dim <= _FLASH_HEAD_DIM
        and head_dim % _FLASH_MULTIPLE == 0
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    )


@lru_cache(maxsize=1)
def _takes_our_arguments(kernel: Callable[..., Tensor]) -> bool:
    missing = {"scale", "window_size", "enable_gqa"} - {*signature(kernel).parameters}
    if missing:  # torch 2.10
        log.warning("attention without its kernel: varlen_attn lacks arguments", missing=sorted(missing))
    return not missing


@lru_cache(maxsize=256)  # the layers of a micro-batch ask for the same ones
def _causal_after(queries: int, keys: int, device: torch.device) -> Tensor:
    """Make the mask of the last `queries` of `keys` tokens, [queries, keys] bool: each attends to those before it."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
