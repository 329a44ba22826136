"""Judges from the rows of metrics.jsonl whether a run learns, for `tandem run`, `status`, `top`, page and summary.

Thresholds are those of deploy/monitoring/rules, if these have the alert; Prometheus also has the past and the other
services. Curves are averaged over a third of the run, 2 to 10 iterations, so that short runs have warnings too and a
single bad iteration of a long run gives none.

Rewards have any sign and scale: 0 or 1, -1 or 1, -6 to -5, 0 to 100. Their differences are therefore measured in the
reward's own spread: the largest standard deviation of an iteration's rewards, averaged as the curves are; the largest,
since that of a solved task or a destroyed policy is near 0. Where it has been 0 throughout, no group had anything to
learn from: the policy has not changed, so it has neither risen nor collapsed (TandemNothingToLearn).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem_files.metrics_file import Heldout

# Of |log pi_trainer - log pi_engine|, in nats. In bfloat16 healthy means are 0.01 to 0.04 with long tails, so that the
# largest of millions of tokens says nothing; in float32 the largest is 1e-5.
_LIMIT_FLOAT32 = 1e-4
_LIMITS_BFLOAT16 = {"logprob_abs_diff_mean": 0.05, "logprob_abs_diff_p999": 0.5}
_IN_WORDS = {
    "logprob_abs_diff_max": "for some token",
    "logprob_abs_diff_p999": "for one token in a thousand",
    "logprob_abs_diff_mean": "on average",
}
# Times the mean difference of the first iterations. Below 1e-3 it is rounding, whatever its trend.
MISMATCH_RISEN = 3.0
_MISMATCH_FLOOR = 1e-3
KL_HIGH = 0.1
ENTROPY_COLLAPSED = 0.05
NOTHING_TO_LEARN = 0.9
# Standard deviations of the reward below its best: of rewards of 0 or 1 that have been right half of the time, 0.25.
REWARD_COLLAPSED = 0.5
ALL_TRUNCATED = 0.9
# Shares of completions that count as wrong because scoring failed, or took too long. Above scoring.py's budgets (5 %
# and 25 % of one batch) the run ends.
REWARD_ERRORS = 0.01
REWARD_TIMEOUTS = 0.05
# Standard deviations of the held-out scores: two standard errors of the mean over 400 prompts.
ACCURACY_LOST = 0.1
# Standard deviations of the reward: one that has risen by so much and is not so far below its best means a solved task,
# not a collapsed policy.
_NOTICEABLE = 0.2
# Standard deviation / mean that is rounding, of scores in float32.
_ROUNDING = 1e-6
_LONGEST = 10
_SHORTEST = 2
# Windows that are averaged in a long run: this is computed in every iteration, and for every snapshot of the page.
_MAX_WINDOWS = 500

Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A problem of the training.

    Attributes:
        kind: identifies the kind of trouble.
        name: name of its alert and of its entry in docs/runbook.md.
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


def troubles(rows: Sequence[Row], heldout: Heldout | None, limits: Mapping[str, float]) -> list[Trouble]:
    """List the troubles of the training now, the worst first.

    Args:
        rows: iterations, the newest last; a row lacks what was not measured.
        heldout: None: there are no evaluations.
        limits: logprob_limits.
    """
    now = _Curves(rows, heldout or Heldout(), limits)
    return [trouble for find in _FINDERS for trouble in find(now)]


def figures(rows: Sequence[Row], heldout: Heldout, limits: Mapping[str, float]) -> dict[str, float]:
    """Return what troubles and Prometheus's rules are judged by, where it is known.

    `reward`: how far it is below its best, `heldout`: below its start, in standard deviations; `mismatch`: the share
    of its limit that the log-probs' difference has; `mismatch_rise`: how many times the first one its mean is.
    """
    now = _Curves(rows, heldout, limits)
    shares = [rows[-1][field] / limit for field, limit in limits.items() if rows and field in rows[-1]]
    found = {
        "reward": now.reward_fall,
        "heldout": now.heldout_fall,
        "mismatch": max(shares, default=None),
        "mismatch_rise": now.mismatch_rise,
    }
    return {name: figure for name, figure in found.items() if figure is not None}


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
        return _mean(self.rows[-self.window :], field) if len(self.rows) >= self.window else None

    def last(self, field: str) -> float | None:
        """Return the field's newest value, for what is not measured in every iteration."""
        return next((row[field] for row in reversed(self.rows) if field in row), None)

    def best(self, field: str) -> float | None:
        """Return the field's largest mean over a window (in long runs over _MAX_WINDOWS of the windows)."""
        starts = range(0, len(self.rows) - self.window + 1, max(1, len(self.rows) // _MAX_WINDOWS))
        means = [_mean(self.rows[start : start + self.window], field) for start in starts]
        return max((mean for mean in means if mean is not None), default=None)

    @cached_property
    def reward_best(self) -> float | None:
        """The largest mean reward over a window."""
        return self.best("reward_mean")

    @cached_property
    def reward_spread(self) -> float:
        """The reward's own spread; 0: it has none, or too few iterations."""
        return _spread(self.best("reward_std"), self.reward_best)

    @cached_property
    def reward_fall(self) -> float | None:
        """How far the mean reward is below its best, in its spread; 0: it has no spread; None: too few iterations."""
        recent, best = self.recent("reward_mean"), self.reward_best
        if recent is None or best is None:
            return None
        return (best - recent) / self.reward_spread if self.reward_spread else 0.0

    @property
    def heldout_fall(self) -> float | None:
        """How far the held-out accuracy is below its start, in the spread of its scores; None: not measured.

        1: no evaluation's scores had any spread, so that all of them were better at the start.
        """
        last, start, std = self.last("heldout_accuracy"), self.heldout.initial, self.heldout.std
        if last is None or start is None or std is None:
            return None
        spread = _spread(std, start) or _spread(abs(start - last), start)
        return (start - last) / spread if spread else 0.0

    @property
    def mismatch_rise(self) -> float | None:
        """The mean difference of log-probs lately / that of the first iterations; None: too few iterations."""
        field = "logprob_abs_diff_mean"
        # Iterations without a train step have none: at first all groups of a hard task may be equal.
        measured = [row for row in self.rows if field in row]
        first, recent = _mean(measured[:_SHORTEST], field), self.recent(field)
        if first is None or recent is None or len(measured) < 2 * self.window:
            return None
        return recent / max(first, _MISMATCH_FLOOR)

    @property
    def solved(self) -> bool:
        """Whether the reward has risen and is near its best, so that little is left to learn."""
        recent, first = self.recent("reward_mean"), self.rows[0].get("reward_mean")
        if recent is None or first is None or self.reward_fall is None:
            return False
        return self.reward_fall <= _NOTICEABLE and recent - first > _NOTICEABLE * self.reward_spread > 0


def _spread(std: float | None, mean: float | None) -> float:
    """Return a standard deviation that is more than rounding, else 0."""
    return 0.0 if std is None or std <= _ROUNDING * abs(mean or 0.0) else std


def _mean(rows: Sequence[Row], field: str) -> float | None:
    values = [row[field] for row in rows if field in row]
    return sum(values) / len(values) if values else None


def _not_finite(now: _Curves) -> Iterator[Trouble]:
    last = now.rows[-1] if now.rows else {}
    missing = [name for name in ("loss", "grad_norm", "entropy") if name not in last]
    if last.get("trained_samples", 0) > 0 and missing:
        text = f"{', '.join(missing)} of the last train step: not a number."
        yield Trouble(kind="not_finite", name="TandemStepsFail", text=text)


def _mismatch(now: _Curves) -> Iterator[Trouble]:
    found = mismatches(now.rows[-1], now.limits) if now.rows else []
    if found:
        yield Trouble(kind="mismatch", name="TandemLogprobMismatch", text=f"{'; '.join(found)}.")
    rise = now.mismatch_rise or 0.0
    if rise > MISMATCH_RISEN:
        text = (
            f"Trainer and engine log-probs differ by {now.recent('logprob_abs_diff_mean'):.3g} on average over "
            f"{now.lately}, {rise:.1f} times as much as in the first ones."
        )
        yield Trouble(kind="mismatch_rising", name="TandemLogprobMismatchRising", text=text)


def _engine_logprobs(now: _Curves) -> Iterator[Trouble]:
    count = now.rows[-1].get("engine_logprobs_not_finite", 0.0) if now.rows else 0.0
    if count:
        text = f"The engine gave no finite log-prob for {count:.0f} tokens of the last iteration."
        yield Trouble(kind="engine_logprobs", name="TandemLogprobMismatch", text=text)


def _accuracy(now: _Curves) -> Iterator[Trouble]:
    last, start = now.last("heldout_accuracy"), now.heldout.initial
    if last is not None and start is not None and (now.heldout_fall or 0.0) > ACCURACY_LOST:
        yield Trouble(
            kind="accuracy",
            name="TandemAccuracyBelowStart",
            text=f"{now.heldout.title.capitalize()} is {last:.3g}; it was {start:.3g} before the training.",
        )


def _reward(now: _Curves) -> Iterator[Trouble]:
    fall = now.reward_fall or 0.0
    if fall > REWARD_COLLAPSED:
        recent, best = now.recent("reward_mean"), now.reward_best
        text = (
            f"The mean reward of {now.lately} is {recent:.3g}; its best over {now.window} was {best:.3g}, "
            f"{fall:.1f} standard deviations of the rewards above."
        )
        yield Trouble(kind="reward", name="TandemRewardCollapsed", text=text)


def _truncated(now: _Curves) -> Iterator[Trouble]:
    share = now.recent("truncated_ratio")
    if share is not None and share > ALL_TRUNCATED:
        yield Trouble(
            kind="truncated",
            name="TandemCompletionsTruncated",
            text=f"{share:.0%} of the completions of {now.lately} are cut off by grpo.max_new_tokens before they end: "
            "raise it, or find out why they do not end (tandem samples). A reward with require_stop gives them 0.",
        )


def _kl(now: _Curves) -> Iterator[Trouble]:
    kl = now.recent("kl_old")
    if kl is not None and kl > KL_HIGH:
        text = f"KL(old || new) averages {kl:.3g} per token over {now.lately}."
        yield Trouble(kind="kl", name="TandemKLHigh", text=text)


def _entropy(now: _Curves) -> Iterator[Trouble]:
    entropy = now.recent("entropy")
    if entropy is not None and entropy < ENTROPY_COLLAPSED and not now.solved:
        text = f"Token entropy averages {entropy:.3g} nats over {now.lately}."
        yield Trouble(kind="entropy", name="TandemEntropyCollapsed", text=text)


def _nothing_to_learn(now: _Curves) -> Iterator[Trouble]:
    equal, std = now.recent("zero_variance_ratio"), now.recent("reward_std")
    if equal is None or equal <= NOTHING_TO_LEARN or now.solved:
        return
    text = f"{equal:.0%} of the groups of {now.lately} have equal rewards."
    reward = now.rows[-1].get("reward_mean", 0.0)
    if equal == 1.0 and std is not None and not _spread(std, reward):
        text = (
            f"Every completion of {now.lately} got the reward {reward:g}, so the policy does "
            "not learn: look at reward.kind, its settings, the answers and grpo.max_new_tokens."
        )
    yield Trouble(kind="equal_rewards", name="TandemNothingToLearn", text=text)


def _scoring(now: _Curves) -> Iterator[Trouble]:
    for prefix, value, which in (
        ("", now.recent, f"the completions of {now.lately}"),
        ("heldout_", now.last, "the completions of the last held-out evaluation"),
    ):
        for field, limit, name, why in (
            ("reward_errors", REWARD_ERRORS, "TandemRewardErrors", "could not be scored"),
            ("reward_timeouts", REWARD_TIMEOUTS, "TandemRewardTimeouts", "took longer than reward.timeout_s to score"),
        ):
            failed, scored = value(prefix + field), value(prefix + "scored_completions")
            if failed is not None and scored and failed > limit * scored:
                text = f"{failed / scored:.1%} of {which} {why}."
                yield Trouble(kind=prefix + field, name=name, text=text)


_FINDERS: tuple[Callable[[_Curves], Iterator[Trouble]], ...] = (
    _not_finite,
    _mismatch,
    _engine_logprobs,
    _scoring,
    _accuracy,
    _reward,
    _truncated,
    _kl,
    _entropy,
    _nothing_to_learn,
)


class Watch:
    """Finds the troubles of a run that are new."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def begun(self, now: Sequence[Trouble]) -> list[Trouble]:
        """Return the troubles that were not in the last call; one that ended and returns is new again."""
        kinds = {trouble.kind for trouble in now}
        new = [trouble for trouble in now if trouble.kind not in self._known]
        self._known = kinds
        return new
