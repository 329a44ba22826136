"""Samples of one prompt share it: in a row, in a micro-batch, on a rank."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_config.schema import GrpoSection
from tests.unit.trainer.batches import random_samples
from tests.unit.trainer.test_packing import ranks, rows_of
from trainer_service.measure.flops import FlopCosts
from trainer_service.micro_batches.cuts import deal
from trainer_service.micro_batches.groups import by_prompt, costs, row_tokens
from trainer_service.micro_batches.packed import PackedRow, context_share, pack
from trainer_service.micro_batches.plan import measure_all, plan_step
from trainer_service.micro_batches.samples import IntArray, Samples


def grouped(prompts: int, completions: list[int], prompt: int = 4, **changes: Any) -> Samples:
    """Samples of `prompts` prompts, in turns; each prompt has completions of these lengths."""
    num = prompts * len(completions)
    lengths = np.repeat(completions, prompts)
    ids = [[*([1 + i % prompts] * prompt), *range(10, 10 + length)] for i, length in enumerate(lengths.tolist())]
    fields: dict[str, Any] = {
        "prompt_lengths": np.full(num, prompt),
        "completion_lengths": lengths,
        "token_ids": np.concatenate(ids),
        "rollout_logprobs": np.zeros(int(lengths.sum()), np.float32),
        "updates": 1,
    }
    return random_samples(num, **{**fields, **changes})


def test_samples_have_the_number_of_their_prompt() -> None:
    assert grouped(3, [1, 2]).prompt_index.tolist() == [0, 1, 2, 0, 1, 2]
    # one prompt is the beginning of the other
    assert random_samples(
        2, prompt_lengths=np.array([1, 2]), completion_lengths=np.array([2, 1]), token_ids=np.array([7, 7, 7, 7, 7, 7])
    ).prompt_index.tolist() == [0, 1]


def seen(batch: PackedRow, position: int, ids: IntArray) -> list[int]:
    """The tokens that one at a position attends to. ids: of all context ranks."""
    ends = np.cumsum(batch.lengths)
    sequence = int(np.searchsorted(ends, position, side="right"))
    first, later = int(batch.attended[:sequence].sum()), int(ends[sequence]) - 1 - position
    keys = np.arange(ids.size) if batch.keys is None else batch.keys
    return [int(token) for token in ids[keys[first : first + int(batch.attended[sequence]) - later]]]


@settings(max_examples=80, deadline=None)
@given(
    completions=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    prompts=st.integers(1, 3),
    prompt=st.integers(1, 5),
    context=st.integers(1, 3),
    rows_of_multiple=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
def test_each_prompt_is_there_once_and_every_prediction_has_its_past_on_one_rank(
    completions: list[int], prompts: int, prompt: int, context: int, rows_of_multiple: int, seed: int
) -> None:
    samples = grouped(prompts, completions, prompt)
    rows = np.random.default_rng(seed).permutation(len(samples))
    multiple = 2 * context if context > 1 else 1
    whole = pack(
        samples, rows, share_prompts=True, sequence_multiple=multiple, row_multiple=multiple * rows_of_multiple
    )
    size, of_row = row_tokens(samples, rows, multiple), multiple * rows_of_multiple
    assert whole.input_ids.size == whole.lengths.sum() == -(-size // of_row) * of_row
    shares = [context_share(whole, rank, context) for rank in range(context)] if context > 1 else [whole]
    ids = np.concatenate([share.input_ids[0] for share in shares])
    found = [
        (int(index), seen(share, int(position), ids), int(target), int(share.position_ids[0, position]))
        for share in shares
        for index, position, target in zip(share.token_index, share.positions, share.targets, strict=True)
    ]
    expected = []
    for row in rows.tolist():
        start, length = int(samples.token_starts[row]), int(samples.lengths[row])
        past = samples.token_ids[start : start + length].tolist()
        for number, before in enumerate(range(prompt, length)):
            index = int(samples.completion_starts[row]) + number
            expected.append((index, past[:before], past[before], before - 1))
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("context", [2, 3, 4])
def test_context_ranks_have_equal_work_whatever_precedes_their_chunks(context: int) -> None:
    multiple = 2 * context
    whole = pack(grouped(3, [2, 30, 9], 21), np.arange(9), share_prompts=True, sequence_multiple=multiple)
    shares = [context_share(whole, rank, context) for rank in range(context)]

    def pairs(batch: PackedRow) -> int:
        """Of a token and one that it attends to."""
        return int((batch.lengths * (batch.attended - batch.lengths) + batch.lengths * (batch.lengths + 1) // 2).sum())

    assert {share.input_ids.size * context for share in shares} == {whole.input_ids.size}
    assert {pairs(share) * context for share in shares} == {pairs(whole)}


def test_equal_lengths_follow_one_another() -> None:
    """Attention computes those together: here all prompts, then the completions of each length."""
    batch = pack(grouped(3, [3, 5, 3]), np.arange(9), share_prompts=True)
    assert batch.lengths.tolist() == [4] * 3 + [4] * 3 + [2] * 6
    assert (batch.attended - batch.lengths).tolist() == [0] * 3 + [4] * 9


def test_a_sample_that_shares_with_no_other_is_one_sequence() -> None:
    batch = pack(grouped(3, [3, 5]), np.array([0, 1, 5]), share_prompts=True)
    assert batch.lengths.tolist() == [8, 6, 6]
    assert batch.attended.tolist() == [8, 6, 6]
    assert batch.keys is None


@settings(max_examples=100, deadline=None)
@given(
    completions=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    max_tokens=st.integers(48, 200),
    wanted=st.one_of(st.none(), st.integers(1, 100)),
    multiple=st.sampled_from([1, 4, 6]),
)
def test_groups_hold_every_sample_once_within_the_budget(
    completions: list[int], max_tokens: int, wanted: int | None, multiple: int
) -> None:
    samples = grouped(2, completions)
    found = by_prompt(samples, np.arange(len(samples)), max_tokens, wanted, multiple)
    assert sorted(found.rows.tolist()) == list(range(len(samples)))
    assert int(found.sizes.sum()) == len(samples)
    for number, tokens in enumerate(found.tokens.tolist()):
        members = found.take(np.array([number]))
        assert len(set(samples.prompt_index[members].tolist())) == 1
        row = pack(samples, members, share_prompts=True, sequence_multiple=multiple)
        assert tokens == row.input_ids.size <= max_tokens
    if wanted is None and row_tokens(samples, np.arange(len(samples)), multiple) <= 2 * 48:
        assert found.sizes.size == 2 or max(found.tokens) > max_tokens // 2


def test_a_wanted_size_divides_groups_but_not_into_copies_of_prompts() -> None:
    samples = grouped(1, [11] * 8, prompt=20)
    rows = np.arange(8)
    assert by_prompt(samples, rows, 1000).tokens.tolist() == [20 + 80]
    assert by_prompt(samples, rows, 1000, 60).tokens.tolist() == [20 + 40] * 2
    assert by_prompt(samples, rows, 1000, 1).tokens.tolist() == [20 + 20] * 4
    assert by_prompt(samples, rows, 50).tokens.tolist() == [20 + 30, 20 + 30, 20 + 20]


def test_costs_count_the_prompt_once_and_all_pairs() -> None:
    samples = grouped(2, [3, 5], prompt=6)
    alone = samples.lengths * (1 + samples.lengths / 100.0)
    assert costs(samples, [np.array([0]), np.array([2])], 100.0) == pytest.approx(alone[[0, 2]])
    (both,) = costs(samples, [np.array([0, 2])], 100.0)
    assert both == pytest.approx(alone[[0, 2]].sum() - 6 * (1 + 6 / 100.0))


def test_ranks_get_whole_groups_where_these_balance_and_parts_where_not() -> None:
    many = grouped(8, [4] * 4, prompt=50)
    owner = deal(many, np.ones(32, np.bool_), 2, 1000.0, share_prompts=True)
    assert all(len(set(owner[many.prompt_index == prompt].tolist())) == 1 for prompt in range(8))
    assert np.bincount(owner).tolist() == [16, 16]
    few = grouped(1, [50] * 4, prompt=5)
    assert sorted(deal(few, np.ones(4, np.bool_), 4, 1000.0, share_prompts=True).tolist()) == [0, 1, 2, 3]
    # another copy of this prompt costs more than the completions
    long = grouped(2, [4] * 4, prompt=500)
    assert sorted(np.bincount(deal(long, np.ones(8, np.bool_), 2, 1000.0, share_prompts=True)).tolist()) == [4, 4]


@pytest.mark.parametrize("data_parallel", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_with_shared_prompts_has_every_sample_and_says_what_it_saves(data_parallel: int, stages: int) -> None:
    update = np.arange(40) // 20
    samples = grouped(8, [3, 3, 7, 1, 9], update_index=update)
    options: dict[str, Any] = {"share_prompts": True, "row_multiple": 4, "max_tokens": 40, "pipeline_parallel": stages}
    each = [ranks(rank, data_parallel, **options) for rank in range(data_parallel)]
    plans = [plan_step(samples, 2, GrpoSection(), of) for of in each]
    computed = tokens = 0
    for number in range(2):
        trained = [[batch for batch in plan.updates[number] if batch.counted] for plan in plans]
        rows = [row for batches in trained for batch in batches for row in batch.rows.tolist()]
        assert sorted(rows) == np.flatnonzero(update == number).tolist()
    batches = [batch for plan in plans for part in (plan.measured, *plan.updates) for batch in part]
    for batch in batches:
        assert batch.input_ids.size <= 40
        computed += batch.input_ids.size
        tokens += row_tokens(samples, batch.rows) if batch.counted else 0
    whole = sum(int((samples.lengths[batch.rows] - 1).sum()) for batch in batches if batch.counted)
    assert {(plan.packing_efficiency, plan.prompt_sharing) for plan in plans} == {(tokens / computed, tokens / whole)}
    assert tokens < whole
    costs = FlopCosts(token=1.0, pair=0.0, completion=0.0)
    passes = [
        plan.flops(samples, costs, epochs=1, reference=reference) for plan in plans for reference in (False, True)
    ]
    assert len(set(passes)) == 2
    once = max(passes) - min(passes)  # a pass over what is trained on; without the reference there are three
    assert (min(passes) - 3 * once) + once == pytest.approx(tokens)
    assert FlopCosts(token=1.0, pair=2.0, completion=9.0).prompts(np.array([4, 1])) == 5 + 2 * (10 + 1)
    measured = [measure_all(samples, of) for of in each]
    assert set.union(*(rows_of(batches) for batches in measured)) == set(range(40))
