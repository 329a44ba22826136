"""Judges from the rows of metrics.jsonl whether a run learns, for `tandem run`, `status`, `top`, page and summary.

The thresholds of alerts are in tandem_files/metrics_table.py. Curves are averaged over a third of the run, 2 to 10
iterations. Short runs have warnings too, and a single bad iteration of a long run gives none.

Rewards have any sign and scale: 0 or 1, -1 or 1, -6 to -5, 0 to 100. Their differences are therefore measured in the
reward's own spread: the largest standard deviation of an iteration's rewards, averaged as the curves are; the largest,
because that of a solved task or a destroyed policy is near 0. Where it has been 0 throughout, no group had anything to
learn from: the policy has not changed, so it has neither risen nor collapsed (TandemNothingToLearn).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

import numpy as np

from tandem_files import metrics_table as table
from tandem_files.metrics_file import Heldout

# Limits of |log pi_trainer - log pi_engine|, in nats. In bfloat16 healthy means are 0.01 to 0.04 with long tails, so
# that the largest of millions of tokens says nothing; in float32 the largest is 1e-5.
_LIMIT_FLOAT32 = 1e-4
_LIMITS_BFLOAT16 = {"logprob_abs_diff_mean": 0.05, "logprob_abs_diff_p999": 0.5}
_IN_WORDS = {
    "logprob_abs_diff_max": "for some token",
    "logprob_abs_diff_p999": "for one token in a thousand",
    "logprob_abs_diff_mean": "on average",
}
# A mean difference below this is rounding, whatever its trend.
_MISMATCH_FLOOR = 1e-3
# Standard deviations of the reward: one that has risen by so much and is not so far below its best means a solved task,
# not a collapsed policy.
_NOTICEABLE = 0.2
# Standard deviations of the reward below its best that are a collapse: of rewards of 0 or 1 that have been right half
# of the time, 0.25.
_COLLAPSED = 0.5
# A fall of _NOTICEABLE is a collapse, too, if at most this share of the rise to the best window is left. The fall must
# be this many standard errors of a window's mean: the best of many windows is 3 of them too good.
_LEFT_OF_GAIN = 0.2
_STANDARD_ERRORS = 6
# Standard deviation / mean that is rounding, of scores in float32.
_ROUNDING = 1e-6
_LONGEST = 10
_SHORTEST = 2
# Windows that are averaged in a long run: this is computed in every iteration, and for every snapshot of the page.
_MAX_WINDOWS = 500

Row = Mapping[str, float]


@dataclass(frozen=True)
class Trouble:
    """A problem of the training, or of the run.

    Attributes:
        kind: identifies the kind of trouble.
        name: name of its alert and of its entry in docs/runbook.md; "" if it has none.
    """

    kind: str
    name: str
    text: str


def logprob_limits(dtypes: Collection[str | None], limit: float | None) -> dict[str, float]:
    """Return which fields of a row say how far trainer and engine differ, each with the most that is no warning.

    Args:
        dtypes: of the model and of the weights as they are synced.
        limit: grpo.logprob_diff_limit.

    >>> logprob_limits(["float32", "same"], None), logprob_limits(["bfloat16", "same"], 0.2)
    ({'logprob_abs_diff_max': 0.0001}, {'logprob_abs_diff_mean': 0.05, 'logprob_abs_diff_p999': 0.2})
    """
    if "bfloat16" in dtypes:
        return _LIMITS_BFLOAT16 | ({} if limit is None else {"logprob_abs_diff_p999": limit})
    return {"logprob_abs_diff_max": _LIMIT_FLOAT32 if limit is None else limit}


def mismatches(row: Mapping[str, float | int | None], limits: Mapping[str, float]) -> list[str]:
    """Say by which figures of an iteration's row, or a step's metrics, trainer and engine differ too much."""
    found = {field: (row.get(field) or 0.0, limit) for field, limit in limits.items()}
    return [
        f"Trainer and engine log-probs differ by {value:.3g} {_IN_WORDS[field]} (limit {limit:g})"
        for field, (value, limit) in found.items()
        if value > limit
    ]


def judged(
    rows: Sequence[Row], heldout: Heldout, limits: Mapping[str, float]
) -> tuple[dict[str, float], list[Trouble]]:
    """Return the troubles, and before them what they and Prometheus's rules are judged by, where it is known."""
    now = _Curves(rows, heldout, limits)
    shares = [rows[-1][field] / limit for field, limit in limits.items() if rows and field in rows[-1]]
    found = {
        "reward": None if now.reward_fall is None else now.reward_fall / now.reward_limit,
        "heldout": now.heldout_fall,
        "mismatch": max(shares, default=None),
        "mismatch_rise": now.mismatch_rise,
    }
    known = {name: figure for name, figure in found.items() if figure is not None}
    return known, [*_of_steps(now), *_of_scoring(now), *_of_scores(now), *_of_policy(now)]


@dataclass(frozen=True)
class _Curves:
    rows: Sequence[Row]
    heldout: Heldout
    limits: Mapping[str, float]

    @property
    def window(self) -> int:
        """Number of iterations that are averaged."""
        return min(_LONGEST, max(_SHORTEST, len(self.rows) // 3))

    @property
    def lately(self) -> str:
        """Name the iterations that `recent` averages."""
        return f"the last {self.window} iterations"

    def recent(self, field: str) -> float | None:
        """Return the field's mean over the newest iterations; None if there are too few."""
        return mean_of(self.rows[-self.window :], field) if len(self.rows) >= self.window else None

    def last(self, field: str) -> float | None:
        """Return the field's newest value, for what is not measured in every iteration."""
        return next((row[field] for row in reversed(self.rows) if field in row), None)

    def means(self, field: str) -> list[float]:
        """Return the field's means over windows (in long runs over _MAX_WINDOWS of the windows)."""
        values = np.array([row.get(field, np.nan) for row in self.rows])
        starts = np.arange(0, len(values) - self.window + 1, max(1, len(values) // _MAX_WINDOWS))
        windows = values[starts[:, None] + np.arange(self.window)]
        known = ~np.isnan(windows)
        sums, counts = np.cumsum(np.where(known, windows, 0.0), axis=1)[:, -1], known.sum(axis=1)
        means: list[float] = (sums[counts > 0] / counts[counts > 0]).tolist()
        return means

    @cached_property
    def reward_best(self) -> float | None:
        """The largest mean reward over a window."""
        return max(self.means(table.REWARD), default=None)

    @cached_property
    def reward_spread(self) -> float:
        """The reward's own spread; 0: it has none, or too few iterations."""
        return _spread(max(self.means("reward_std"), default=None), self.reward_best)

    @cached_property
    def reward_fall(self) -> float | None:
        """How far the mean reward is below its best, in its spread; 0: it has no spread; None: too few iterations."""
        recent, best = self.recent(table.REWARD), self.reward_best
        if recent is None or best is None:
            return None
        return (best - recent) / self.reward_spread if self.reward_spread else 0.0

    @cached_property
    def reward_limit(self) -> float:
        """The least reward_fall that is a collapse.

        Of rewards that were seldom right, even the loss of all is less than _COLLAPSED (of 0.15, 0.42). What tells
        it from noise is the scatter from one iteration to the next, which has that of the prompts in it.
        """
        recent, best = self.recent(table.REWARD), self.reward_best
        if recent is None or best is None or not self.reward_spread:
            return _COLLAPSED
        worst = min(self.means(table.REWARD))
        if recent - worst > _LEFT_OF_GAIN * (best - worst):
            return _COLLAPSED
        rewards = [row[table.REWARD] for row in self.rows if table.REWARD in row]
        steps = [later - earlier for earlier, later in pairwise(rewards)]
        scatter = math.sqrt(sum(step * step for step in steps) / (2 * max(1, len(steps))))
        noise = _STANDARD_ERRORS * scatter / math.sqrt(self.window) / self.reward_spread
        return min(_COLLAPSED, max(_NOTICEABLE, noise))

    @property
    def heldout_fall(self) -> float | None:
        """How far the held-out accuracy is below its start, in the spread of its scores; None: not measured.

        1: no evaluation's scores had any spread, so that all of them were better at the start.
        """
        last, start, std = self.last(table.ACCURACY), self.heldout.initial, self.heldout.std
        if last is None or start is None or std is None:
            return None
        spread = _spread(std, start) or _spread(abs(start - last), start)
        return (start - last) / spread if spread else 0.0

    @property
    def mismatch_rise(self) -> float | None:
        """The mean difference of log-probs lately / that of the first iterations; None: too few iterations."""
        field = "logprob_abs_diff_mean"
        # Iterations without a train step have none: at first all groups of a hard task may be equal.
        measured = list(islice((row for row in self.rows if field in row), 2 * self.window))
        first, recent = mean_of(measured[:_SHORTEST], field), self.recent(field)
        if first is None or recent is None or len(measured) < 2 * self.window:
            return None
        return recent / max(first, _MISMATCH_FLOOR)

    @property
    def solved(self) -> bool:
        """Whether the reward has risen and is near its best, so that little is left to learn."""
        recent, first = self.recent(table.REWARD), self.rows[0].get(table.REWARD)
        if recent is None or first is None or self.reward_fall is None:
            return False
        return self.reward_fall <= _NOTICEABLE and recent - first > _NOTICEABLE * self.reward_spread > 0


def _spread(std: float | None, mean: float | None) -> float:
    """Return a standard deviation that is more than rounding, else 0."""
    return 0.0 if std is None or std <= _ROUNDING * abs(mean or 0.0) else std


def mean_of(rows: Sequence[Row], field: str) -> float | None:
    """Average a field over the rows that have it; None if none has it."""
    values = [row[field] for row in rows if field in row]
    return sum(values) / len(values) if values else None


def _of_steps(now: _Curves) -> Iterator[Trouble]:
    last: Row = now.rows[-1] if now.rows else {}
    missing = [name for name in ("loss", "grad_norm", "entropy") if name not in last]
    if last.get("trained_samples", 0) > 0 and missing:
        yield Trouble("not_finite", "TandemStepsFail", f"{', '.join(missing)} of the last train step: not a number.")
    if found := mismatches(last, now.limits):
        yield Trouble("mismatch", "TandemLogprobMismatch", f"{'; '.join(found)}.")
    if (rise := now.mismatch_rise or 0.0) > table.MISMATCH_RISEN.value:
        text = (
            f"Trainer and engine log-probs differ by {now.recent('logprob_abs_diff_mean'):.3g} on average over "
            f"{now.lately}, {rise:.1f} times as much as in the first ones."
        )
        yield Trouble("mismatch_rising", table.MISMATCH_RISEN.alert, text)
    if count := last.get("engine_logprobs_not_finite", 0.0):
        text = f"The engine gave no finite log-prob for {count:.0f} tokens of the last iteration."
        yield Trouble("engine_logprobs", "TandemLogprobMismatch", text)


def _of_scoring(now: _Curves) -> Iterator[Trouble]:
    for prefix, value, which in (
        ("", now.recent, f"the completions of {now.lately}"),
        ("heldout_", now.last, "the completions of the last held-out evaluation"),
    ):
        for field, limit, why in (
            ("reward_errors", table.REWARD_ERRORS, "could not be scored"),
            ("reward_timeouts", table.REWARD_TIMEOUTS, "took longer than reward.timeout_s to score"),
        ):
            failed, scored = value(prefix + field), value(prefix + "scored_completions")
            if failed is not None and scored and failed > limit.value * scored:
                yield Trouble(prefix + field, limit.alert, f"{failed / scored:.1%} of {which} {why}.")


def _of_scores(now: _Curves) -> Iterator[Trouble]:
    last, start = now.last(table.ACCURACY), now.heldout.initial
    if last is not None and start is not None and (now.heldout_fall or 0.0) > table.ACCURACY_LOST.value:
        text = f"{now.heldout.title.capitalize()} is {last:.3g}; it was {start:.3g} before the training."
        yield Trouble("accuracy", table.ACCURACY_LOST.alert, text)
    fall = now.reward_fall or 0.0
    if fall / now.reward_limit > table.REWARD_COLLAPSED.value:
        text = (
            f"The mean reward of {now.lately} is {now.recent(table.REWARD):.3g}; its best over {now.window} was "
            f"{now.reward_best:.3g}, {fall:.2g} standard deviations of the rewards above."
        )
        yield Trouble("reward", table.REWARD_COLLAPSED.alert, text)


def _of_policy(now: _Curves) -> Iterator[Trouble]:
    if (share := now.recent("truncated_ratio") or 0.0) > table.ALL_TRUNCATED.value:
        text = (
            f"{share:.0%} of the completions of {now.lately} are cut off by grpo.max_new_tokens before they end: "
            "raise it, or find out why they do not end (tandem samples). A reward with require_stop gives them 0."
        )
        yield Trouble("truncated", table.ALL_TRUNCATED.alert, text)
    if (kl := now.recent("kl_old") or 0.0) > table.KL_HIGH.value:
        yield Trouble("kl", table.KL_HIGH.alert, f"KL(old || new) averages {kl:.3g} per token over {now.lately}.")
    entropy = now.recent("entropy")
    if entropy is not None and entropy < table.ENTROPY_COLLAPSED.value and not now.solved:
        text = f"Token entropy averages {entropy:.3g} nats over {now.lately}."
        yield Trouble("entropy", table.ENTROPY_COLLAPSED.alert, text)
    if (equal := now.recent("zero_variance_ratio") or 0.0) > table.NOTHING_TO_LEARN.value and not now.solved:
        text = f"{equal:.0%} of the groups of {now.lately} have equal rewards."
        std, reward = now.recent("reward_std"), now.rows[-1].get(table.REWARD, 0.0)
        if equal == 1.0 and std is not None and not _spread(std, reward):
            text = (
                f"Every completion of {now.lately} got the reward {reward:g}, so the policy does "
                "not learn: look at reward.kind, its settings, the answers and grpo.max_new_tokens."
            )
        yield Trouble("equal_rewards", table.NOTHING_TO_LEARN.alert, text)
