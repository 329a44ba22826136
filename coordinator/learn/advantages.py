"""Step 5: rewards to advantages: centred in each prompt's group, divided by a standard deviation. Pure NumPy.

Legend: P prompts, G completions per prompt. Source: DeepSeekMath (GRPO); `none` is the mean-baseline form of Dr. GRPO;
leave-one-out: RLOO (Kool et al. 2019, Ahmadian et al. 2024).
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

StdKind = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave-one-out"]
# Added to the standard deviation: keeps the quotient finite without changing it visibly for rewards of order 1.
STD_EPSILON = 1e-6


def zero_variance(rewards_PG: NDArray[np.float64], missing_PG: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """Find the groups that carry no signal because all of their rewards are equal.

    Args:
        rewards_PG: [P, G] rewards, G >= 1.
        missing_PG: [P, G] True: no reward; None: all have one.
    Returns: [P] booleans; True too for a group with fewer than two rewards.

    >>> zero_variance(np.array([[1.0, 0.0], [0.3, 0.3]])).tolist()
    [False, True]
    >>> zero_variance(np.array([[1.0, 0.0, 0.0]]), np.array([[False, True, True]])).tolist()
    [True]
    """
    if missing_PG is None:
        missing_PG = np.zeros(rewards_PG.shape, dtype=np.bool_)
    highest_P = np.where(missing_PG, -np.inf, rewards_PG).max(axis=1)
    lowest_P = np.where(missing_PG, np.inf, rewards_PG).min(axis=1)
    flat_P: NDArray[np.bool_] = highest_P <= lowest_P
    return flat_P


def group_advantages(
    rewards_PG: NDArray[np.float64],
    *,
    std: StdKind = "group",
    baseline: Baseline = "mean",
    missing_PG: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Centre rewards within each prompt's group and scale them.

    Args:
        rewards_PG: [P, G] finite rewards.
        std: what centred rewards are divided by: the group's unbiased standard deviation + 1e-6, the whole batch's, or
            nothing.
        baseline: what is subtracted: the group's mean, or the mean of the others in it.
        missing_PG: [P, G] True: the sample has no reward. It takes part in no mean and no deviation, as if the group
            were smaller, and its advantage is 0. None: all have one.
    Returns: [P, G]; each row sums to 0 (to rounding) and a row of equal rewards is exactly 0.
    Raises: ValueError: not a non-empty [P, G] array, or a reward is not finite (its place is named).

    >>> group_advantages(np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]]), std="none").tolist()
    [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    >>> group_advantages(np.array([[1.0, 0.0, 0.0, 1.0]])).round(4).tolist()
    [[0.866, -0.866, -0.866, 0.866]]
    >>> group_advantages(np.array([[3.0, 0.0, 0.0]]), std="none", baseline="leave-one-out").tolist()
    [[3.0, -1.5, -1.5]]
    >>> group_advantages(np.array([[3.0]])).tolist()
    [[0.0]]
    >>> missing = np.array([[False, False, True]])
    >>> group_advantages(np.array([[1.0, 0.0, 0.0]]), std="none", missing_PG=missing).tolist()
    [[0.5, -0.5, 0.0]]
    """
    _check(rewards_PG)
    if missing_PG is not None and missing_PG.any():
        return _without_missing(rewards_PG, ~missing_PG, std, baseline)
    flat_P = zero_variance(rewards_PG)
    centred_PG: NDArray[np.float64] = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    # The mean of equal floats may differ from them in the last bit: 1e-17 / 1e-6 would be trained on as a signal.
    centred_PG[flat_P] = 0.0
    if baseline == "leave-one-out":
        # r - (sum - r) / (G - 1) = (r - mean) G / (G - 1); a group of one is flat
        centred_PG *= rewards_PG.shape[1] / max(1, rewards_PG.shape[1] - 1)
    if std == "none":
        return centred_PG
    spread = _unbiased_std(rewards_PG) if std == "group" else _unbiased_std(rewards_PG.reshape(1, -1))
    scaled_PG: NDArray[np.float64] = centred_PG / (spread + STD_EPSILON)
    return scaled_PG


def _without_missing(
    rewards_PG: NDArray[np.float64], present_PG: NDArray[np.bool_], std: StdKind, baseline: Baseline
) -> NDArray[np.float64]:
    """Compute each group's advantages from its present rewards alone."""
    advantages_PG = np.zeros(rewards_PG.shape)
    for rewards_G, present_G, advantages_G in zip(rewards_PG, present_PG, advantages_PG, strict=True):
        if present_G.any():
            inner: StdKind = "group" if std == "group" else "none"
            rewards = rewards_G[present_G].reshape(1, -1)
            advantages_G[present_G] = group_advantages(rewards, std=inner, baseline=baseline)[0]
    if std != "batch" or not present_PG.any():
        return advantages_PG
    scaled_PG: NDArray[np.float64] = advantages_PG / (
        _unbiased_std(rewards_PG[present_PG].reshape(1, -1)) + STD_EPSILON
    )
    return scaled_PG


def _unbiased_std(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the standard deviation with ddof 1, [R, C] -> [R, 1]; 0 for a single column (ddof 1 would be 0 / 0)."""
    if values.shape[1] < 2:
        return np.zeros((values.shape[0], 1))
    spread: NDArray[np.float64] = values.std(axis=1, ddof=1, keepdims=True)
    return spread


def _check(rewards_PG: NDArray[np.float64]) -> None:
    if rewards_PG.ndim != 2 or rewards_PG.size == 0:
        raise ValueError(f"rewards must be a non-empty [P, G] array, not of shape {rewards_PG.shape}")
    if not np.isfinite(rewards_PG).all():
        row, column = np.argwhere(~np.isfinite(rewards_PG))[0]
        raise ValueError(
            f"reward of completion {column} of group {row} is {rewards_PG[row, column]}: rewards must be finite"
        )
