"""Core attention of packed rows against softmax over one sequence at a time, on one rank and on context ranks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tests.kit.stores import tiny_spec
from tests.unit.trainer.live_bytes import LiveBytes
from trainer_service.megatron_engine.attention import core
from trainer_service.megatron_engine.attention.core import PackedAttention
from trainer_service.megatron_engine.attention.packing import RowPacking
from trainer_service.megatron_engine.build import transformer_config
from trainer_service.micro_batches.packed import PackedRow, context_share
from weightsync.layouts.layout import Parallel

HEADS, GROUPS, DIM = 4, 2, 8
CPU = torch.device("cpu")
Three = tuple[Tensor, Tensor, Tensor]


def inputs(tokens: int) -> Three:
    """Queries, keys and values of a row, float64."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, DIM))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    return made[0], made[1], made[2]


def alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float,
    of_keys: Sequence[int] | None = None,
) -> Tensor:
    """Softmax of each sequence's scores, written out. Keys may be more than queries, which are the last of them."""
    out, of_keys = [], lengths if of_keys is None else of_keys
    for q, k, v in zip(query.split(lengths), key.split(of_keys), value.split(of_keys), strict=True):
        k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1 + len(k) - len(q)).bool(), -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out).flatten(1)


Prefixes = Sequence[tuple[int, int]]  # (start, length) in the row, of each sequence


def keys_of(lengths: Sequence[int], prefixes: Prefixes) -> list[int]:
    """What each sequence attends to, sequence after sequence: its prefix, and itself."""
    ends = np.cumsum(lengths).tolist()
    return [
        index
        for (start, size), end, length in zip(prefixes, ends, lengths, strict=True)
        for index in (*range(start, start + size), *range(end - length, end))
    ]


def row(lengths: Sequence[int], prefixes: Prefixes | None = None) -> PackedRow:
    """A row of sequences, some of which attend to (start, length) of the row first."""
    empty = np.zeros(0, np.int64)
    sizes = [size for _, size in prefixes or []] or [0] * len(lengths)
    return PackedRow(
        input_ids=np.arange(sum(lengths))[None],
        position_ids=np.arange(sum(lengths))[None],  # not read
        lengths=np.array(lengths),
        attended=np.array(lengths) + np.array(sizes),
        keys=None if prefixes is None else np.array(keys_of(lengths, prefixes)),
        positions=empty,
        targets=empty,
        token_index=empty,
        rows=empty,
        counted=True,
    )


def packing(lengths: Sequence[int], prefixes: Prefixes | None = None) -> RowPacking:
    return RowPacking.of(row(lengths, prefixes), CPU)


def attention(context: int = 1) -> PackedAttention:
    config = transformer_config(tiny_spec("qwen2"), Parallel(context=context), torch.float32, False)
    return PackedAttention(config, 1, None, "self", softmax_scale=0.3)


def assert_equal_with_gradients(got: Tensor, expected: Tensor, of: Three) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    factor = torch.randn(got.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    pair = [torch.autograd.grad((out * factor).sum(), of) for out in (got, expected)]
    for one, other in zip(*pair, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_each_sequence_attends_within_itself(lengths: list[int]) -> None:
    of = inputs(sum(lengths))
    got = attention()(*of, packed_seq_params=packing(lengths))
    assert_equal_with_gradients(got, alone(*of, lengths, 0.3), of)


# Two prompts, of 3 and 4 tokens; a sample of its own; completions of the prompts, two of them of equal length.
SHARED_LENGTHS = [3, 5, 4, 2, 2, 1, 4]
SHARED_PREFIXES = [(0, 0), (0, 0), (0, 0), (0, 3), (0, 3), (8, 4), (8, 4)]


def expected_of_shared(of: Three, lengths: Sequence[int], prefixes: Prefixes) -> Tensor:
    """Each completion after its own copy of the prompt's keys and values."""
    sizes = [length + size for length, (_, size) in zip(lengths, prefixes, strict=True)]
    keys = keys_of(lengths, prefixes)
    return alone(of[0], of[1][keys], of[2][keys], lengths, 0.3, sizes)


def test_a_completion_attends_to_its_shared_prompt_and_to_itself() -> None:
    of = inputs(sum(SHARED_LENGTHS))
    got = attention()(*of, packed_seq_params=packing(SHARED_LENGTHS, SHARED_PREFIXES))
    assert_equal_with_gradients(got, expected_of_shared(of, SHARED_LENGTHS, SHARED_PREFIXES), of)


def test_copies_of_a_prompt_are_not_held_for_the_backward_pass() -> None:
    prompt, completions = 64, 16
    lengths, prefixes = [prompt, *([2] * completions)], [(0, 0), *([(0, prompt)] * completions)]
    of = [torch.randn(sum(lengths), HEADS, DIM).requires_grad_() for _ in range(3)]
    described, module = packing(lengths, prefixes), attention()
    module(*of, packed_seq_params=described)  # its mask stays
    with LiveBytes() as live:
        out = module(*of, packed_seq_params=described)
        held = live.total()
    copies = 2 * completions * (prompt + 2) * HEADS * DIM * out.element_size()
    assert live.peak > copies
    assert held < copies / 4


def varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, of_keys: Tensor, *longest: int, **options: Any
) -> Tensor:
    """In the place of torch's kernel, by what its documentation says of each argument: it runs on GPUs only."""
    assert (ends.dtype, of_keys.dtype) == (torch.int32, torch.int32)
    assert options.pop("window_size") == (-1, 0)
    assert options.pop("enable_gqa") is True
    lengths, sizes = ends.diff().tolist(), of_keys.diff().tolist()
    assert longest == (max(lengths), max(sizes))
    return alone(query, key, value, lengths, options["scale"], sizes).unflatten(1, (HEADS, DIM))


@pytest.mark.parametrize("shared", [False, True])
def test_the_kernel_gets_the_sequences_and_a_causal_window(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr(core, "varlen_attn", varlen)
    monkeypatch.setattr(core, "has_kernel", lambda query: True)
    lengths, prefixes = (SHARED_LENGTHS, SHARED_PREFIXES) if shared else ([3, 3, 1, 5], [(0, 0)] * 4)
    of = inputs(sum(lengths))
    got = attention()(*of, packed_seq_params=packing(lengths, prefixes if shared else None))
    assert_equal_with_gradients(got, expected_of_shared(of, lengths, prefixes), of)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"is_cuda": False}, False),
        ({"shape": (4, 2, 320)}, False),
        ({"shape": (4, 2, 12)}, False),
        ({"device": "old"}, False),
    ],
)
def test_the_kernel_is_used_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device == "old" else (9, 0))
    monkeypatch.setattr(core, "varlen_attn", varlen_attn)  # torch's own, which is imported on GPUs only
    fields = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (4, 2, 128), "device": "new"} | changes
    query: Any = SimpleNamespace(**fields)
    assert core.has_kernel(query) is expected
    monkeypatch.setattr(core, "varlen_attn", None)
    assert not core.has_kernel(query)


def test_the_kernel_of_a_torch_without_windows_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_10(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        is_causal: bool = False, return_aux: Any = None,
    ) -> Tensor:  # fmt: skip
        raise TypeError

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(4, 2, 128), device="new")
    monkeypatch.setattr(core, "varlen_attn", varlen_attn)
    assert core.has_kernel(query)
    monkeypatch.setattr(core, "varlen_attn", of_torch_2_10)
    assert not core.has_kernel(query)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_together_attend_as_one(
    monkeypatch: pytest.MonkeyPatch, size: int, shared: bool, kernel: bool
) -> None:
    lengths = [4 * size, 2 * size, 2 * size, 6 * size]
    # of the first sequence without its padding, and of a whole one
    prefixes = [(0, 0), (0, 0), (0, 4 * size - 3), (4 * size, 2 * size)] if shared else None
    of, whole = inputs(sum(lengths)), row(lengths, prefixes)
    from megatron.core import parallel_state  # not before `core`, which prepares it for CPUs

    monkeypatch.setattr(core, "varlen_attn", varlen)
    monkeypatch.setattr(core, "has_kernel", lambda query: kernel)
    shares = [context_share(whole, rank, size) for rank in range(size)]
    held = [torch.from_numpy(share.input_ids[0]) for share in shares]
    gathered = torch.cat(held)
    out = torch.zeros(sum(lengths), HEADS * DIM, dtype=torch.float64)
    for rank, share in enumerate(shares):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda group=group: group)
        others = iter([of[1][gathered], of[2][gathered]])
        monkeypatch.setattr(core, "gather_from_sequence_parallel_region", lambda x, group, o=others: next(o))
        mine = attention(size)(*(x[held[rank]] for x in of), packed_seq_params=RowPacking.of(share, CPU))
        out = out.index_put((held[rank],), mine)
    assert_equal_with_gradients(out, expected_of_shared(of, lengths, prefixes or [(0, 0)] * 4), of)
