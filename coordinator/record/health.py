"""Judges from the rows of metrics.jsonl whether a run learns, for `tandem run`, `status`, `top`, page and summary.

Thresholds are those of deploy/monitoring/rules, if these have the alert; Prometheus also has the past and the other
services. Curves are averaged over a third of the run, 2 to 10 iterations, so that short runs have warnings too and a
single bad iteration of a long run gives none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

KL_HIGH = 0.1
ENTROPY_COLLAPSED = 0.05
NOTHING_TO_LEARN = 0.9
REWARD_COLLAPSED = 0.5
ALL_TRUNCATED = 0.9
# Shares of completions that count as wrong because scoring failed, or took too long. Above scoring.py's budgets (5 %
# and 25 % of one batch) the run ends.
REWARD_ERRORS = 0.01
REWARD_TIMEOUTS = 0.05
# Loss of held-out accuracy, above the noise of a few hundred prompts.
ACCURACY_LOST = 0.05
# Share of the best reward: a reward that has risen to about that means a solved task, not a collapsed policy.
_ABOUT_BEST = 0.9
_RISEN = 1.1
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


def troubles(rows: Sequence[Row], initial_accuracy: float | None, logprob_diff_limit: float) -> list[Trouble]:
    """List the troubles of the training now, the worst first.

    Args:
        rows: iterations, the newest last; a row lacks what was not measured.
        initial_accuracy: on held-out prompts before the first iteration.
        logprob_diff_limit: grpo.logprob_diff_limit.
    """
    return [trouble for find in _FINDERS for trouble in find(_Curves(rows, initial_accuracy, logprob_diff_limit))]


@dataclass(frozen=True)
class _Curves:
    rows: Sequence[Row]
    initial_accuracy: float | None
    logprob_diff_limit: float

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

    @property
    def solved(self) -> bool:
        """Whether the reward has risen and is near its best, so that little is left to learn."""
        recent, best, first = self.recent("reward_mean"), self.best("reward_mean"), self.rows[0].get("reward_mean")
        if recent is None or best is None or first is None:
            return False
        return recent >= _ABOUT_BEST * best and recent > _RISEN * first


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
    difference = now.rows[-1].get("logprob_abs_diff_max", 0.0) if now.rows else 0.0
    if difference > now.logprob_diff_limit:
        yield Trouble(
            kind="mismatch",
            name="TandemLogprobMismatch",
            text=f"Trainer and engine log-probs differ by {difference:.3g} (limit {now.logprob_diff_limit:g}).",
        )


def _engine_logprobs(now: _Curves) -> Iterator[Trouble]:
    count = now.rows[-1].get("engine_logprobs_not_finite", 0.0) if now.rows else 0.0
    if count:
        text = f"The engine gave no finite log-prob for {count:.0f} tokens of the last iteration."
        yield Trouble(kind="engine_logprobs", name="TandemLogprobMismatch", text=text)


def _accuracy(now: _Curves) -> Iterator[Trouble]:
    last = now.last("heldout_accuracy")
    if last is not None and now.initial_accuracy is not None and last < now.initial_accuracy - ACCURACY_LOST:
        yield Trouble(
            kind="accuracy",
            name="TandemAccuracyBelowStart",
            text=f"Held-out accuracy is {last:.3f}; it was {now.initial_accuracy:.3f} before the training.",
        )


def _reward(now: _Curves) -> Iterator[Trouble]:
    recent, best = now.recent("reward_mean"), now.best("reward_mean")
    if recent is not None and best is not None and recent < REWARD_COLLAPSED * best:
        text = f"The mean reward of {now.lately} is {recent:.3g}; its best over {now.window} was {best:.3g}."
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
    equal, spread = now.recent("zero_variance_ratio"), now.recent("reward_std")
    if equal is None or equal <= NOTHING_TO_LEARN or now.solved:
        return
    text = f"{equal:.0%} of the groups of {now.lately} have equal rewards."
    if equal == 1.0 and spread == 0.0:
        reward = now.rows[-1].get("reward_mean", 0.0)
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
