import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rollout_service.sglang_cpu import padding
from rollout_service.sglang_cpu.padding import attend, decode_chunks, extend_chunks, plan_chunks

HEADS, KEY_HEADS, SIZE = 4, 2, 8
PREFIXES = [0, 5, 17, 0, 3, 29]
NEW = [7, 1, 4, 1, 12, 2]


class Pool:
    """A KV cache with the sequences' tokens at random slots, NaN in what belongs to no one."""

    def __init__(self, lengths: list[int]) -> None:
        torch.manual_seed(0)
        total = sum(lengths)
        slots = torch.randperm(total) + 1
        self.req_to_token = torch.full((len(lengths), max(lengths) + 3), total + 1, dtype=torch.int32)
        start = 0
        for row, length in enumerate(lengths):
            self.req_to_token[row, :length] = slots[start : start + length].int()
            start += length
        self.keys = torch.randn(total + 2, KEY_HEADS, SIZE)
        self.values = torch.randn(total + 2, KEY_HEADS, SIZE)
        self.values[total + 1] = float("nan")  # stale entries of req_to_token point here

    def reference(self, query_QHD: torch.Tensor, row: int, prefix: int) -> torch.Tensor:
        """One sequence alone."""
        length = prefix + query_QHD.shape[0]
        slots = self.req_to_token[row, :length].long()
        positions = torch.arange(prefix, length).unsqueeze(1)
        out = scaled_dot_product_attention(
            query_QHD.transpose(0, 1),
            self.keys[slots].transpose(0, 1),
            self.values[slots].transpose(0, 1),
            attn_mask=torch.arange(length) <= positions,
            scale=0.3,
            enable_gqa=True,
        )
        return out.transpose(0, 1)


@pytest.mark.parametrize("max_keys", [65536, 40, 1])
def test_extend_equals_each_sequence_alone(max_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "MAX_CHUNK_KEYS", max_keys)
    lengths = [p + n for p, n in zip(PREFIXES, NEW, strict=True)]
    pool = Pool(lengths)
    query = torch.randn(sum(NEW), HEADS, SIZE)
    out = torch.full_like(query, float("inf"))
    rows = torch.arange(len(NEW))
    tensors = [torch.tensor(each) for each in (lengths, PREFIXES, NEW)]
    for chunk in extend_chunks(pool.req_to_token, rows, *tensors):
        valid = chunk.index_NQ >= 0
        part = attend(query[chunk.index_NQ.clamp(min=0)], pool.keys, pool.values, chunk, 0.3)
        out[chunk.index_NQ[valid]] = part[valid]
    start = 0
    for row, (prefix, new) in enumerate(zip(PREFIXES, NEW, strict=True)):
        expected = pool.reference(query[start : start + new], row, prefix)
        torch.testing.assert_close(out[start : start + new], expected, atol=1e-6, rtol=0)
        start += new


@pytest.mark.parametrize("max_keys", [65536, 40, 1])
def test_decode_equals_each_sequence_alone(max_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "MAX_CHUNK_KEYS", max_keys)
    lengths = [3, 30, 1, 18, 30]
    pool = Pool(lengths)
    query = torch.randn(len(lengths), HEADS, SIZE)
    out = torch.empty_like(query)
    for chunk in decode_chunks(pool.req_to_token, torch.arange(len(lengths)), torch.tensor(lengths)):
        out[chunk.index_NQ] = attend(query[chunk.index_NQ], pool.keys, pool.values, chunk, 0.3)
    for row, length in enumerate(lengths):
        expected = pool.reference(query[row : row + 1], row, length - 1)
        torch.testing.assert_close(out[row : row + 1], expected, atol=1e-6, rtol=0)


def test_chunks_hold_every_sequence_once_within_the_bounds() -> None:
    lengths = [1 + (37 * i) % 5000 for i in range(300)]
    queries = [1 + (17 * i) % length for i, length in enumerate(lengths)]
    chunks = plan_chunks(lengths, queries)
    assert sorted(row for chunk in chunks for row in chunk) == list(range(300))
    for chunk in chunks:
        keys = len(chunk) * max(lengths[row] for row in chunk)
        mask = keys * max(queries[row] for row in chunk)
        assert len(chunk) == 1 or (keys <= padding.MAX_CHUNK_KEYS and mask <= padding.MAX_CHUNK_MASK)


def test_one_batch_of_short_sequences_is_one_chunk() -> None:
    assert plan_chunks([6] * 512, [6] * 512) == [list(range(512))]
