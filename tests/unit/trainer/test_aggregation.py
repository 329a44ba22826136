"""Denominators are global over an update, and only over it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem_config.schema import GrpoSection
from tests.unit.trainer.batches import random_samples
from trainer_service.objectives.aggregation import Aggregation, sample_weights, update_weights


def test_masked_sample_keeps_its_place_in_the_denominators() -> None:
    lengths = np.array([1, 3, 4, 4])
    samples = random_samples(
        4,
        updates=2,
        prompt_lengths=np.ones(4, np.int64),
        completion_lengths=lengths,
        trainable=np.array([True, False, True, True]),
    )
    assert update_weights(samples, GrpoSection()).tolist() == pytest.approx([1 / 4, 0, 1 / 8, 1 / 8])
    grpo = GrpoSection(aggregation="dr-grpo", max_new_tokens=10)
    assert update_weights(samples, grpo).tolist() == pytest.approx([1 / 20, 0, 1 / 20, 1 / 20])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # 2 + 1 + 3 of the policy's tokens in the first update, 1 in the second; the second sample is not trainable
        ("token-mean", [1 / 6, 0, 1 / 6, 1]),
        ("seq-mean-token-mean", [1 / (3 * 2), 0, 1 / (3 * 3), 1]),
        ("seq-mean-token-sum", [1 / 3, 0, 1 / 3, 1]),
        ("dr-grpo", [1 / (3 * 8), 0, 1 / (3 * 8), 1 / 8]),
    ],
)
def test_masked_tokens_are_in_no_denominator(aggregation: Aggregation, expected: list[float]) -> None:
    masks = [[1, 0, 0, 1], [0, 1], [1, 1, 1], [0, 0, 0, 1, 0]]
    samples = random_samples(
        4,
        update_index=np.array([0, 0, 0, 1]),
        prompt_lengths=np.ones(4, np.int64),
        completion_lengths=np.array([len(mask) for mask in masks]),
        trainable=np.array([True, False, True, True]),
        loss_mask=np.array([token for mask in masks for token in mask], np.bool_),
    )
    found = update_weights(samples, GrpoSection(aggregation=aggregation, max_new_tokens=8))
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"])
def test_the_sequences_of_an_episode_weigh_as_one_sample(aggregation: Aggregation) -> None:
    """Cut into sequences, its tokens weigh what they weigh in one."""
    grpo, lengths = GrpoSection(aggregation=aggregation, max_new_tokens=8), [2 + 3 + 1, 4, 5 + 2, 3]
    updates, trainable = np.array([0, 0, 1, 1]), np.array([True, True, True, False])
    whole = random_samples(
        4,
        update_index=updates,
        prompt_lengths=np.ones(4, np.int64),
        completion_lengths=np.array(lengths),
        trainable=trainable,
    )
    owner = np.array([0, 0, 0, 1, 2, 2, 3])
    cut = random_samples(
        7,
        update_index=updates[owner],
        prompt_lengths=np.ones(7, np.int64),
        completion_lengths=np.array([2, 3, 1, 4, 5, 2, 3]),
        trainable=trainable[owner],
        continues=np.diff(owner, prepend=-1) == 0,
    )
    assert update_weights(cut, grpo).tolist() == update_weights(whole, grpo)[owner].tolist()
    apart = update_weights(replace(cut, continues=np.empty(0, np.bool_)), grpo)
    assert (apart != update_weights(cut, grpo)).any() == (aggregation != "token-mean")


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 2, 1 / 6]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2]),
        ("dr-grpo", [1 / 16, 1 / 16]),
    ],
)
def test_aggregations(aggregation: Aggregation, expected: list[float]) -> None:
    weights = sample_weights(torch.tensor([1, 3]), aggregation, max_new_tokens=8)
    assert weights.tolist() == pytest.approx(expected)


def test_unknown_aggregation_is_named() -> None:
    with pytest.raises(ValueError, match="median"):
        sample_weights(torch.tensor([1]), "median", max_new_tokens=1)  # type: ignore[arg-type]
