from typing import Any

import numpy as np
import pytest

from coordinator.learn.advantages import STD_EPSILON, StdKind, group_advantages, zero_variance

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_rows_sum_to_zero(std: StdKind) -> None:
    advantages = group_advantages(RNG.normal(size=(9, 5)), std=std)
    assert np.abs(advantages.sum(axis=1)).max() < 1e-12


def test_group_std_is_unbiased_per_group() -> None:
    rewards = np.array([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    spread = np.array([[np.sqrt(7.0)], [np.sqrt(3.0)]])
    expected = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + STD_EPSILON)
    np.testing.assert_allclose(group_advantages(rewards, std="group"), expected, rtol=1e-12)


def test_batch_std_is_one_number_for_all() -> None:
    rewards = np.array([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    expected = centred / (np.std(rewards, ddof=1) + STD_EPSILON)
    np.testing.assert_allclose(group_advantages(rewards, std="batch"), expected, rtol=1e-12)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_leave_one_out_compares_each_reward_with_the_others_of_its_group(std: StdKind) -> None:
    rewards, missing = RNG.normal(size=(4, 6)), np.zeros((4, 6), dtype=bool)
    missing[1, 2:] = missing[2, 1:] = missing[3, 3] = True
    spreads: dict[str, list[Any]] = {
        "none": [1.0] * 4,
        "group": [np.std(row[~gone], ddof=1) + STD_EPSILON if (~gone).sum() > 1 else 1.0
                  for row, gone in zip(rewards, missing, strict=True)],
        "batch": [np.std(rewards[~missing], ddof=1) + STD_EPSILON] * 4,
    }  # fmt: skip
    found = group_advantages(rewards, std=std, baseline="leave-one-out", missing_PG=missing)
    for row in range(4):
        present = np.flatnonzero(~missing[row])
        for place in range(6):
            others = [rewards[row, other] for other in present if other != place]
            compared = rewards[row, place] - np.mean(others) if others and place in present else 0.0
            assert found[row, place] == pytest.approx(compared / spreads[std][row], abs=1e-12)


def test_leave_one_out_of_equal_rewards_is_exactly_zero() -> None:
    rewards = np.array([[0.1] * 7, [3.0] * 7])
    assert (group_advantages(rewards, baseline="leave-one-out") == 0.0).all()
    assert group_advantages(np.array([[2.0]]), baseline="leave-one-out").tolist() == [[0.0]]


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e9])
def test_equal_rewards_give_exactly_zero(std: StdKind, value: float) -> None:
    rewards = np.array([[value] * 7, [0.0] * 6 + [1.0]])
    advantages = group_advantages(rewards, std=std)
    assert (advantages[0] == 0.0).all()
    assert zero_variance(rewards).tolist() == [True, False]


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_a_group_of_one_is_zero_and_not_nan(std: StdKind) -> None:
    assert group_advantages(np.array([[2.0], [5.0]]), std=std).tolist() == [[0.0], [0.0]]
    assert group_advantages(np.array([[2.0]]), std=std).tolist() == [[0.0]]


def test_bad_rewards_are_named() -> None:
    with pytest.raises(ValueError, match="completion 1 of group 0 is nan"):
        group_advantages(np.array([[0.0, np.nan]]))
    with pytest.raises(ValueError, match=r"not of shape \(0, 4\)"):
        group_advantages(np.zeros((0, 4)))


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_a_sample_without_a_reward_is_as_if_it_had_not_been_sampled(std: StdKind) -> None:
    rewards = RNG.normal(size=(4, 6))
    missing = np.zeros((4, 6), dtype=bool)
    missing[:, 2] = True
    rewards[:, 2] = 1e6
    without = group_advantages(np.delete(rewards, 2, axis=1), std=std)
    found = group_advantages(rewards, std=std, missing_PG=missing)
    np.testing.assert_allclose(np.delete(found, 2, axis=1), without, rtol=1e-12)
    assert (found[:, 2] == 0.0).all()


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_groups_with_few_rewards_or_none_have_no_signal(std: StdKind) -> None:
    rewards = np.array([[1.0, 5.0, 5.0], [1.0, 2.0, 5.0], [3.0, 4.0, 5.0]])
    missing = np.array([[False, True, True], [True, True, True], [False, False, True]])
    advantages = group_advantages(rewards, std=std, missing_PG=missing)
    assert (advantages[:2] == 0.0).all()
    assert advantages[2, 0] == -advantages[2, 1] != 0.0
    assert zero_variance(rewards, missing).tolist() == [True, True, False]
    assert (group_advantages(rewards, std=std, missing_PG=np.ones((3, 3), dtype=bool)) == 0.0).all()
