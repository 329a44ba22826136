"""Dealing, cutting, packing and planning: every completion token is in exactly one place of every pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_config.schema import GrpoSection
from tests.kit.stores import tiny_spec
from tests.unit.trainer.batches import random_samples
from trainer_service.measure.flops import FlopCosts
from trainer_service.micro_batches.cuts import cut, deal
from trainer_service.micro_batches.packed import PackedRow, context_share, pack
from trainer_service.micro_batches.plan import RankShare, measure_all, plan_step
from trainer_service.micro_batches.samples import Samples
from weightsync.layouts.layout import Parallel


def ranks(data_rank: int = 0, data_parallel: int = 1, **changes: Any) -> RankShare:
    fields = {"pipeline_parallel": 1, "max_tokens": 64, "even_length": 100.0}
    return RankShare(data_rank=data_rank, data_parallel=data_parallel, **{**fields, **changes})


def rows_of(batches: list[PackedRow]) -> set[int]:
    return {row for batch in batches for row in batch.rows.tolist()}


def tokens_of(samples: Samples, sample: int) -> list[int]:
    """What the model reads of a sample."""
    start = samples.token_starts[sample]
    return [int(token) for token in samples.token_ids[start : start + samples.lengths[sample] - 1]]


def test_a_row_holds_the_sequences_and_knows_where_completions_are() -> None:
    samples = random_samples(6)
    batch = pack(samples, np.array([4, 1]))
    assert batch.input_ids.tolist() == [tokens_of(samples, 4) + tokens_of(samples, 1)]
    assert batch.lengths.tolist() == [samples.lengths[4] - 1, samples.lengths[1] - 1]
    assert batch.position_ids.tolist() == [[*range(batch.lengths[0]), *range(batch.lengths[1])]]
    # the token before each target, in the sample, is the one at its position
    first = samples.token_starts + samples.prompt_lengths - 1
    before = [samples.token_ids[first[i] : first[i] + samples.completion_lengths[i]] for i in (4, 1)]
    assert batch.input_ids[0, batch.positions].tolist() == np.concatenate(before).tolist()
    assert batch.token_index.size == samples.completion_lengths[[4, 1]].sum()


@pytest.mark.parametrize(("sequences", "row"), [(1, 1), (1, 4), (4, 4), (4, 8)])
def test_padding_follows_each_sequence_and_then_the_row(sequences: int, row: int) -> None:
    samples = random_samples(6)
    batch = pack(samples, np.arange(6), sequence_multiple=sequences, row_multiple=row)
    whole = batch.input_ids[0].tolist()
    assert len(whole) == batch.lengths.sum()
    assert batch.position_ids[0].tolist() == [place for length in batch.lengths for place in range(length)]
    assert len(whole) % row == 0
    assert not np.any(batch.lengths % sequences)
    start = 0
    for sample, length in zip(range(6), batch.lengths.tolist(), strict=False):
        true = tokens_of(samples, sample)
        assert whole[start : start + length] == true + [0] * (length - len(true))
        assert length - len(true) < sequences
        start += length
    assert sum(whole[start:]) == 0
    assert len(whole) - start < row


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=60),
    max_tokens=st.integers(32, 200),
    stages=st.integers(1, 4),
    multiple=st.integers(1, 3),
    data_parallel=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_cuts_hold_every_sample_once_within_the_budget_in_equal_numbers(
    lengths: list[int], max_tokens: int, stages: int, multiple: int, data_parallel: int, seed: int
) -> None:
    tokens = np.array(lengths)
    owner = np.random.default_rng(seed).integers(0, data_parallel, tokens.size)
    shares = [tokens[owner == rank] for rank in range(data_parallel)]
    cuts = cut(shares, max_tokens=max_tokens, pipeline_parallel=stages, count_multiple=multiple)
    counts = {len(parts) for parts in cuts}
    assert len(counts) == 1
    assert counts.pop() % multiple == 0
    for share, parts in zip(shares, cuts, strict=True):
        assert sorted(np.concatenate(parts).tolist()) == list(range(share.size))
        assert all(share[part].sum() <= max_tokens for part in parts)
        assert all(np.all(np.diff(share[part]) <= 0) for part in parts)  # equal ones follow one another


def test_few_micro_batches_suffice() -> None:
    """Not many more than the tokens need, and of about equally many tokens."""
    tokens = np.minimum(np.random.default_rng(0).geometric(0.01, 500), 1000)
    (parts,) = cut([tokens], max_tokens=2048, pipeline_parallel=1)
    sizes = [int(tokens[part].sum()) for part in parts]
    assert len(parts) <= 1 + -(-int(tokens.sum()) // 2048)
    assert min(sizes) > 0.9 * max(sizes)


def test_a_sample_beyond_the_budget_is_alone() -> None:
    (parts,) = cut([np.array([40, 3, 3])], max_tokens=32, pipeline_parallel=1)
    assert [part.tolist() for part in parts] == [[0], [1, 2]]


def test_the_budget_holds_where_tokens_alone_would_need_fewer_micro_batches() -> None:
    (parts,) = cut([np.array([20, 20, 20])], max_tokens=32, pipeline_parallel=1)
    assert [part.tolist() for part in parts] == [[0], [1], [2]]


def test_pipeline_gets_several_micro_batches() -> None:
    (parts,) = cut([np.full(1000, 16)], max_tokens=100_000, pipeline_parallel=2)
    assert len(parts) == 4


@pytest.mark.parametrize("data_parallel", [2, 3])
def test_ranks_get_equal_work(data_parallel: int) -> None:
    """In every pass, by the cost of attention; by tokens alone they would be up to 0.2 and 0.5 apart."""
    lengths = np.minimum(np.random.default_rng(1).geometric(0.01, 160), 2000)
    samples = replace(random_samples(160, updates=4), prompt_lengths=lengths, completion_lengths=np.ones(160, np.int64))
    cost = samples.lengths + samples.lengths**2 / 500.0
    active = np.arange(160) % 3 != 0
    owner = deal(samples, active, data_parallel, 500.0)
    for update in range(4):
        for kind in (True, False):
            mine = (samples.update_index == update) & (active == kind)
            sums = [cost[mine & (owner == rank)].sum() for rank in range(data_parallel)]
            assert max(sums) - min(sums) <= 0.15 * np.mean(sums)


def test_ranks_that_got_more_in_an_update_get_less_in_others() -> None:
    samples = random_samples(6, updates=6)
    samples = replace(samples, prompt_lengths=np.full(6, 4), completion_lengths=np.ones(6, np.int64))
    assert sorted(deal(samples, np.ones(6, np.bool_), 3, 100.0).tolist()) == [0, 0, 1, 1, 2, 2]


def test_even_length_is_where_scores_cost_as_much_as_the_weights() -> None:
    spec = tiny_spec("qwen2")
    queries = spec.num_heads * spec.head_dim
    weights = (
        2 * spec.hidden_size * (queries + spec.num_kv_heads * spec.head_dim) + 3 * spec.hidden_size * spec.ffn_size
    )
    length = FlopCosts.of(spec).even_length
    # of each of L tokens: two products, on average with L / 2 keys, 2 FLOPs each
    assert 2 * (2 * queries * length / 2) == pytest.approx(2 * weights)


@pytest.mark.parametrize("data_parallel", [1, 2, 3])
@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_plan_measures_and_trains_each_sample_where_it_should(data_parallel: int, old: str) -> None:
    advantages = np.arange(40, dtype=np.float32) % 4
    trainable = np.arange(40) % 5 != 0
    samples = random_samples(40, advantages=advantages, trainable=trainable)
    grpo = GrpoSection(old_logprobs=old)
    plans = [plan_step(samples, 2, grpo, ranks(rank, data_parallel)) for rank in range(data_parallel)]
    active = trainable & (advantages != 0)
    measured = [rows_of(plan.measured) for plan in plans]
    trained = [[rows_of(update) for update in plan.updates] for plan in plans]
    for update in range(2):
        expected = set(np.flatnonzero(active & (samples.update_index == update)).tolist())
        assert set.union(*(of_rank[update] for of_rank in trained)) == expected
        assert sum(len(of_rank[update]) for of_rank in trained) == len(expected)
    first = set(np.flatnonzero(active & (samples.update_index == 0)).tolist())
    assert set.union(*measured) == (set() if old == "rollout" else set(range(40)) - first)
    if old == "recompute":
        # what is trained on in a later update has its old log-probs on the same rank
        assert all(of_rank[1] <= had for of_rank, had in zip(trained, measured, strict=True))


def test_rank_without_samples_gets_a_stand_in_that_counts_nowhere() -> None:
    samples = random_samples(2, updates=1)
    plans = [plan_step(samples, 1, GrpoSection(), ranks(r, 3)) for r in range(3)]
    assert [plan.updates[0][0].counted for plan in plans] == [True, True, False]


def test_update_without_gradient_runs_nothing_anywhere() -> None:
    samples = random_samples(4, updates=1, advantages=np.zeros(4, np.float32))
    plan = plan_step(samples, 1, GrpoSection(), ranks())
    assert plan.updates == [[]]
    assert plan_step(samples, 1, GrpoSection(entropy_coefficient=0.1), ranks()).updates != [[]]


@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_share_each_sequence_and_every_completion_token_once(size: int) -> None:
    whole = pack(random_samples(6), np.arange(6), sequence_multiple=2 * size, row_multiple=8 * size)
    shares = [context_share(whole, rank, size) for rank in range(size)]
    for rank, share in enumerate(shares):
        sequences = np.split(np.arange(whole.input_ids.size), np.cumsum(whole.lengths)[:-1])
        numbers = (rank, 2 * size - 1 - rank)
        held = np.concatenate([np.split(tokens, 2 * size)[number] for number in numbers for tokens in sequences])
        assert np.array_equal(share.input_ids, whole.input_ids[:, held])
        assert np.array_equal(share.position_ids, whole.position_ids[:, held])
        # the token that predicts each target is the one at its position, as in the whole
        mine = np.isin(whole.token_index, share.token_index)
        assert np.array_equal(share.input_ids[0, share.positions], whole.input_ids[0, whole.positions[mine]])
        assert np.array_equal(share.targets, whole.targets[mine])
        assert np.array_equal(share.lengths, np.tile(whole.lengths // (2 * size), 2))
    tokens = np.concatenate([share.token_index for share in shares])
    assert sorted(tokens.tolist()) == sorted(whole.token_index.tolist())


def test_a_token_s_context_rank_depends_on_its_sample_only() -> None:
    """Or its log-prob at the start of the step would be on another rank than its loss."""
    samples = random_samples(6)
    options: dict[str, Any] = {"sequence_multiple": 4, "row_multiple": 16}
    alone = [context_share(pack(samples, np.array([i]), **options), 0, 2).token_index for i in range(6)]
    together = context_share(pack(samples, np.arange(6), **options), 0, 2).token_index
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("count_multiple", [1, 2, 4])
def test_all_ranks_run_equally_many_micro_batches(count_multiple: int) -> None:
    samples = random_samples(41, updates=1)
    options = {"count_multiple": count_multiple, "max_tokens": 24}
    each = [measure_all(samples, ranks(rank, 3, **options)) for rank in range(3)]
    assert len({len(batches) for batches in each}) == 1
    assert len(each[0]) % count_multiple == 0
    counted = [rows_of([batch for batch in batches if batch.counted]) for batches in each]
    assert set.union(*counted) == set(range(41))
    assert sum(len(rows) for rows in counted) == 41


def test_packing_efficiency_counts_padding_and_stand_ins_of_all_ranks() -> None:
    samples = random_samples(21, updates=2)
    options = {"sequence_multiple": 4, "row_multiple": 16, "count_multiple": 2, "max_tokens": 24}
    plans = [plan_step(samples, 2, GrpoSection(), ranks(rank, 2, **options)) for rank in range(2)]
    batches = [batch for plan in plans for each in (plan.measured, *plan.updates) for batch in each]
    computed = sum(batch.input_ids.size for batch in batches)
    true = sum(int((samples.lengths[batch.rows] - 1).sum()) for batch in batches if batch.counted)
    assert plans[0].packing_efficiency == plans[1].packing_efficiency == pytest.approx(true / computed)
    assert plan_step(samples, 2, GrpoSection(), ranks()).packing_efficiency == 1.0


SIZES: list[tuple[Parallel, bool, tuple[int, int, int]]] = [
    (Parallel(tensor=2, pipeline=2), False, (1, 1, 1)),
    (Parallel(tensor=2), True, (1, 2, 1)),
    (Parallel(tensor=2, context=2), True, (4, 8, 1)),
    (Parallel(context=3), False, (6, 6, 1)),
    (Parallel(pipeline=4, virtual_pipeline=2), False, (1, 1, 4)),
    (Parallel(tensor=2, data=2, expert=2, expert_tensor=2), True, (1, 2, 1)),
]


@pytest.mark.parametrize(("parallel", "sequence_parallel", "expected"), SIZES)
def test_parallel_sizes_decide_what_micro_batches_must_be(
    parallel: Parallel, sequence_parallel: bool, expected: tuple[int, int, int]
) -> None:
    options: dict[str, Any] = {"max_tokens": 64, "data_rank": 0, "context_rank": 0}
    of = RankShare.of(parallel, tiny_spec("qwen2"), sequence_parallel=sequence_parallel, **options)
    assert (of.sequence_multiple, of.row_multiple, of.count_multiple) == expected
