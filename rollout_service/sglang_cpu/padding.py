"""Attention over sequences of different lengths, padded into few large calls; torch only.

Letters in names: N sequences of a chunk, Q padded new tokens, K padded keys, H query heads, J key heads, G = H / J,
D head size.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# Padded keys of a chunk: 64 Ki tokens x 8 key heads x 128 x 4 bytes = 256 MiB for K, the same for V; a layer at a time.
MAX_CHUNK_KEYS = 65536
# Padding that costs as much as another call, in keys.
MAX_CHUNK_PADDING = 1024
# Elements of a chunk's mask [N, Q, K]; a single sequence beyond it goes to the upstream code, which needs no mask.
MAX_CHUNK_MASK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class AttentionChunk:
    """Sequences that are computed in one call."""

    slots_NK: torch.Tensor  # KV cache slot of each key; padding points at slot 0, which holds no sequence
    mask_NQK: torch.Tensor  # True where a query may attend
    index_NQ: torch.Tensor  # rows of the flat query; -1 is padding


def plan_chunks(lengths: list[int], queries: list[int]) -> list[list[int]]:
    """Cut the batch into chunks of similar length whose padded sizes keep the two bounds above.

    Args:
        lengths: keys per sequence, prefix and new tokens together; > 0.
        queries: new tokens per sequence; > 0.
    Returns: positions in the batch, every one in exactly one chunk; a sequence too large for any bound is alone.
    """
    chunks: list[list[int]] = []
    current: list[int] = []
    longest_q = total = 0
    for row in sorted(range(len(lengths)), key=lambda i: (lengths[i], queries[i])):
        num, longest_q = len(current) + 1, max(longest_q, queries[row])
        keys = num * lengths[row]  # ascending order: this one is the chunk's longest
        total += lengths[row]
        is_large = keys > MAX_CHUNK_KEYS or keys * longest_q > MAX_CHUNK_MASK
        if current and (is_large or keys - total > MAX_CHUNK_PADDING):
            chunks.append(current)
            current, longest_q, total = [], queries[row], lengths[row]
        current.append(row)
    if current:
        chunks.append(current)
    return chunks


def decode_chunks(req_to_token: torch.Tensor, pool_index: torch.Tensor, seq_lens: torch.Tensor) -> list[AttentionChunk]:
    """Plan the chunks of a decode step: N sequences, one query token each."""
    lengths = seq_lens.tolist()
    chunks = []
    for rows in plan_chunks(lengths, [1] * len(lengths)):
        rows_N = torch.tensor(rows)
        slots_NK, valid_NK = _slots(req_to_token, pool_index[rows_N], seq_lens[rows_N])
        chunks.append(AttentionChunk(slots_NK=slots_NK, mask_NQK=valid_NK.unsqueeze(1), index_NQ=rows_N.unsqueeze(1)))
    return chunks


def extend_chunks(
    req_to_token: torch.Tensor,
    pool_index: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
) -> list[AttentionChunk]:
    """Plan the chunks of a prefill: N sequences of extend_lens new tokens after prefix_lens cached ones."""
    starts = extend_lens.cumsum(0) - extend_lens
    chunks = []
    for rows in plan_chunks(seq_lens.tolist(), extend_lens.tolist()):
        rows_N = torch.tensor(rows)
        slots_NK, valid_NK = _slots(req_to_token, pool_index[rows_N], seq_lens[rows_N])
        step_Q = torch.arange(int(extend_lens[rows_N].max()))
        # Query a of a sequence with prefix p sits at position p + a and sees the keys 0..p + a. A padded query sees
        # real keys too, so no row of the softmax is empty.
        position_NQ = prefix_lens[rows_N].unsqueeze(1) + step_Q
        causal_NQK = torch.arange(slots_NK.shape[1]) <= position_NQ.unsqueeze(2)
        index_NQ = torch.where(
            step_Q < extend_lens[rows_N].unsqueeze(1), starts[rows_N].unsqueeze(1) + step_Q, torch.tensor(-1)
        )
        mask_NQK = causal_NQK & valid_NK.unsqueeze(1)
        chunks.append(AttentionChunk(slots_NK=slots_NK, mask_NQK=mask_NQK, index_NQ=index_NQ))
    return chunks


def _slots(req_to_token: torch.Tensor, pool_N: torch.Tensor, len_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    longest = int(len_N.max())
    valid_NK = torch.arange(longest) < len_N.unsqueeze(1)
    # Entries of req_to_token after a sequence's end are stale; a NaN there would survive a softmax weight of 0.
    return req_to_token[pool_N, :longest].masked_fill(~valid_NK, 0).long(), valid_NK


def attend(
    query_NQHD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, chunk: AttentionChunk, scaling: float | None
) -> torch.Tensor:
    """Compute grouped-query attention of a chunk. Returns: [N, Q, H, D]."""
    n, q, h, d = query_NQHD.shape
    j = k_cache.shape[1]
    keys = k_cache[chunk.slots_NK].transpose(1, 2)  # [N, J, K, D]
    values = v_cache[chunk.slots_NK].transpose(1, 2)
    # The G query heads of a key head become further query rows: keys are read once, not repeated G times.
    query = query_NQHD.view(n, q, j, h // j, d).permute(0, 2, 3, 1, 4).reshape(n, j, (h // j) * q, d)
    mask = chunk.mask_NQK.unsqueeze(1).expand(n, h // j, q, -1).reshape(n, 1, (h // j) * q, -1)
    out = scaled_dot_product_attention(
        query, keys.to(query.dtype), values.to(query.dtype), attn_mask=mask, scale=scaling
    )
    return out.view(n, j, h // j, q, -1).permute(0, 3, 1, 2, 4).reshape(n, q, h, -1)
