"""What an evaluation measures: mean@k, pass@k and maj@k, with 95 % confidence intervals over prompts. Pure.

Legend: P prompts, G completions per prompt. Each prompt has a value, and the measure is their mean:

mean@G   the mean score of its completions
pass@k   the chance that one of k completions, drawn from the G without replacement, is right: 1 - C(G-c, k) / C(G, k)
         with c right ones (Chen et al. 2021, arXiv:2107.03374); unbiased for any G >= k
maj@G    the mean score of the completions with the answer that most of them give; equally frequent ones count alike

Interval: Wilson's if all values are 0 or 1, else the bootstrap's percentiles over prompts. It says how the measure
would vary over other prompts of the same kind; what the reward gets wrong is not in it. Rows with the same prompt are
copies: each counts in the mean, and the interval is over the different prompts, all copies of one being one draw.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

# Quantile of the normal distribution for 95 %.
_Z = 1.959963984540054
RESAMPLES = 1000
# Numbers drawn together: 8 MiB.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A measure, with the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def estimates(
    names: Iterable[str],
    scores_PG: NDArray[np.float64],
    answers_PG: Sequence[Sequence[str]],
    right_from: float,
    prompts_P: Sequence[Hashable] | None = None,
) -> dict[str, Estimate]:
    """Estimate the measures of these names.

    Args:
        scores_PG: [P, G] scores; NaN: none could be found.
        answers_PG: [P, G] answers, for maj@G.
        right_from: least score of a right completion.
        prompts_P: [P] what is equal for copies of a prompt; None: all prompts are different.
    """
    numbers: dict[Hashable, int] = {}
    copies_P = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts_P or range(len(scores_PG))]
    return {name: _estimate(name, scores_PG, answers_PG, right_from, copies_P) for name in names}


def _estimate(
    name: str,
    scores_PG: NDArray[np.float64],
    answers_PG: Sequence[Sequence[str]],
    right_from: float,
    copies_P: Sequence[int],
) -> Estimate:
    kind, _, k = name.partition("@")
    present_PG = ~np.isnan(scores_PG)
    measured_P = present_PG.sum(axis=1) >= (int(k) if kind == "pass" else 1)
    values = [
        _value(
            kind,
            int(k),
            [float(score) for score in scores_PG[p][present_PG[p]]],
            [answer for answer, present in zip(answers_PG[p], present_PG[p], strict=True) if present],
            right_from,
        )
        for p in map(int, np.flatnonzero(measured_P))
    ]
    return mean_with_interval(np.array(values, dtype=np.float64), np.asarray(copies_P)[measured_P])


def _value(kind: str, k: int, scores_G: list[float], answers_G: list[str], right_from: float) -> float:
    match kind:
        case "mean":
            return sum(scores_G) / len(scores_G)
        case "pass":
            return pass_at_k(len(scores_G), sum(score >= right_from for score in scores_G), k)
        case "maj":
            return majority_score(scores_G, answers_G)
    raise ValueError(f"unknown measure {kind!r}")


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate the chance that one of k completions is right.

    Raises: ValueError: there are fewer than k.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 3, 2)
    (0.25, 0.5, 0.0, 1.0)
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_right} right ones among {num_samples}")
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def majority_score(scores_G: Sequence[float], answers_G: Sequence[str]) -> float:
    """Return the mean score of the completions with the most frequent answer, and of all such answers in a tie.

    >>> majority_score([1.0, 1.0, 0.0], ["7", "7", "8"]), majority_score([1.0, 0.0], ["7", "8"])
    (1.0, 0.5)
    """
    by_answer: dict[str, list[float]] = defaultdict(list)
    for score, answer in zip(scores_G, answers_G, strict=True):
        by_answer[answer].append(score)
    most = max(Counter(answers_G).values())
    means = [sum(scores) / len(scores) for scores in by_answer.values() if len(scores) == most]
    return sum(means) / len(means)


def mean_with_interval(
    values_P: NDArray[np.float64], copies_P: NDArray[np.int64] | None = None, seed: int = 0
) -> Estimate:
    """Estimate the mean of values of prompts; NaN without any.

    Args:
        copies_P: [P] the number of each one's prompt, the same for copies; None: all prompts are different.
        seed: of the bootstrap; the same values always have the same interval.
    """
    if not values_P.size:
        return Estimate(value=float("nan"), low=float("nan"), high=float("nan"))
    # D different prompts.
    weights_D: NDArray[np.float64] = np.ones(values_P.size)
    values_D = values_P
    if copies_P is not None:
        _, numbers_P = np.unique(copies_P, return_inverse=True)
        weights_D = np.bincount(numbers_P).astype(np.float64)
        values_D = np.bincount(numbers_P, values_P) / weights_D
    is_even = (weights_D == weights_D[0]).all() or (values_D == values_D[0]).all()
    if is_even and np.isin(values_D, (0.0, 1.0)).all():
        return _wilson(int(values_D.sum()), values_D.size)
    low, high = np.percentile(_resampled_means(values_D, weights_D, np.random.default_rng(seed)), (2.5, 97.5))
    return Estimate(value=float(values_P.mean()), low=float(low), high=float(high))


def _wilson(num_right: int, num: int) -> Estimate:
    """Wilson's score interval (1927); it stays in [0, 1], and has a width when all or none are right."""
    share = num_right / num
    centre = (share + _Z**2 / (2 * num)) / (1 + _Z**2 / num)
    half = _Z / (1 + _Z**2 / num) * np.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    # The share itself is inside; rounding could put it outside by one unit in the last place.
    return Estimate(
        value=share, low=float(min(share, max(0.0, centre - half))), high=float(max(share, min(1.0, centre + half)))
    )


def _resampled_means(
    values_D: NDArray[np.float64], weights_D: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    rows = max(1, min(RESAMPLES, _CHUNK // values_D.size))
    means: list[NDArray[np.float64]] = []
    while sum(map(len, means)) < RESAMPLES:
        drawn = rng.integers(values_D.size, size=(rows, values_D.size))
        means.append((values_D * weights_D)[drawn].sum(axis=1) / weights_D[drawn].sum(axis=1))
    return np.concatenate(means)[:RESAMPLES]
