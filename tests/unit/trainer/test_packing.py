"""Dealing, cutting, padding and planning: every completion token is in exactly one place of every pass."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_config.schema import GrpoSection
from tests.unit.trainer.batches import random_samples
from trainer_service.batch.cuts import cut, deal
from trainer_service.batch.padded import Padded, context_share, pad
from trainer_service.batch.plan import RankShare, measure_all, plan_step
from weightsync.layouts.layout import Parallel


def ranks(data_rank: int = 0, data_parallel: int = 1, **changes: Any) -> RankShare:
    fields = {"pipeline_parallel": 1, "width_multiple": 1, "max_tokens": 64}
    return RankShare(data_rank=data_rank, data_parallel=data_parallel, **{**fields, **changes})


def rows_of(batches: list[Padded]) -> set[int]:
    return {row for batch in batches for row in batch.rows.tolist()}


def test_padded_rows_hold_the_tokens_and_know_where_completions_are() -> None:
    samples = random_samples(6)
    batch = pad(samples, np.array([4, 1]))
    flat = batch.input_ids.reshape(-1)
    for row, sample in enumerate([4, 1]):
        start, length = samples.token_starts[sample], samples.lengths[sample]
        assert batch.input_ids[row, : length - 1].tolist() == samples.token_ids[start : start + length - 1].tolist()
        assert not batch.input_ids[row, length - 1 :].any()
    # the token before each target, in the sample, is the one at its position
    first = samples.token_starts + samples.prompt_lengths - 1
    before = [samples.token_ids[first[i] : first[i] + samples.completion_lengths[i]] for i in (4, 1)]
    assert flat[batch.positions].tolist() == np.concatenate(before).tolist()
    assert batch.token_index.size == samples.completion_lengths[[4, 1]].sum()


def test_width_is_rounded_up() -> None:
    assert pad(random_samples(6), np.array([0, 1]), multiple=4).input_ids.shape[1] % 4 == 0


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=60),
    max_tokens=st.integers(32, 200),
    stages=st.integers(1, 4),
)
def test_cuts_hold_every_sample_once_within_the_budget(lengths: list[int], max_tokens: int, stages: int) -> None:
    array = np.array(lengths)
    rows = np.arange(array.size) + 100
    parts = cut(rows, array, max_tokens=max_tokens, pipeline_parallel=stages)
    assert sorted(np.concatenate(parts).tolist()) == rows.tolist()
    assert all(part.size * array[part - 100].max() <= max_tokens for part in parts)


def test_pipeline_gets_several_micro_batches() -> None:
    lengths = np.full(1000, 16)
    parts = cut(np.arange(1000), lengths, max_tokens=100_000, pipeline_parallel=2)
    assert len(parts) == 4


def test_ranks_get_equal_work() -> None:
    samples = random_samples(80, updates=4)
    active = np.arange(80) % 3 != 0
    owner = deal(samples, active, 2)
    for update in range(4):
        for kind in (True, False):
            mine = owner[(samples.update_index == update) & (active == kind)]
            assert abs(int((mine == 0).sum()) - int((mine == 1).sum())) <= 1


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
def test_context_ranks_share_the_columns_and_every_completion_token_once(size: int) -> None:
    whole = pad(random_samples(6), np.arange(6), multiple=2 * size)
    shares = [context_share(whole, rank, size) for rank in range(size)]
    chunk = whole.input_ids.shape[1] // (2 * size)
    for rank, share in enumerate(shares):
        first, second = whole.input_ids[:, rank * chunk :], whole.input_ids[:, (2 * size - 1 - rank) * chunk :]
        assert np.array_equal(share.input_ids, np.hstack([first[:, :chunk], second[:, :chunk]]))
        # the token that predicts each target is the one at its position, as in the whole
        before = whole.input_ids.reshape(-1)[whole.positions[np.isin(whole.token_index, share.token_index)]]
        assert np.array_equal(share.input_ids.reshape(-1)[share.positions], before)
        assert np.array_equal(share.targets, whole.targets[np.isin(whole.token_index, share.token_index)])
    tokens = np.concatenate([share.token_index for share in shares])
    assert sorted(tokens.tolist()) == sorted(whole.token_index.tolist())


@pytest.mark.parametrize("count_multiple", [1, 2, 4])
@pytest.mark.parametrize("in_step", [False, True])
def test_micro_batches_come_in_the_numbers_that_the_engine_needs(count_multiple: int, in_step: bool) -> None:
    samples = random_samples(41, updates=1)
    options = {"count_multiple": count_multiple, "in_step": in_step, "max_tokens": 24}
    each = [measure_all(samples, ranks(rank, 3, **options)) for rank in range(3)]
    plain = [measure_all(samples, ranks(rank, 3, max_tokens=24)) for rank in range(3)]
    counts = [len(batches) for batches in each]
    assert all(count % count_multiple == 0 for count in counts)
    assert len(set(counts)) == 1 or not in_step
    assert max(counts) < max(len(batches) for batches in plain) + count_multiple
    counted = [[batch for batch in batches if batch.counted] for batches in each]
    assert [rows_of(batches) for batches in counted] == [rows_of(batches) for batches in plain]


SIZES: list[tuple[Parallel, bool, tuple[int, int, bool]]] = [
    (Parallel(tensor=2, pipeline=2), False, (1, 1, False)),
    (Parallel(tensor=2), True, (2, 1, False)),
    (Parallel(tensor=2, context=2), True, (8, 1, False)),
    (Parallel(context=3), False, (6, 1, False)),
    (Parallel(pipeline=4, virtual_pipeline=2), False, (1, 4, False)),
    (Parallel(data=2, expert=2), False, (1, 1, True)),
    (Parallel(tensor=2, data=2, expert=2), True, (2, 1, False)),
    (Parallel(tensor=2, data=2, expert=2, expert_tensor=2), True, (2, 1, True)),
    (Parallel(tensor=2, expert=2), True, (2, 1, False)),
]


@pytest.mark.parametrize(("parallel", "sequence_parallel", "expected"), SIZES)
def test_parallel_sizes_decide_what_micro_batches_must_be(
    parallel: Parallel, sequence_parallel: bool, expected: tuple[int, int, bool]
) -> None:
    of = RankShare.of(parallel, sequence_parallel=sequence_parallel, max_tokens=64, data_rank=0, context_rank=0)
    assert (of.width_multiple, of.count_multiple, of.in_step) == expected
