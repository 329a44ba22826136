"""Alerts that the coordinator can see by itself, with the thresholds of deploy/monitoring/rules. Pure.

Prometheus also looks at the past and at the other services; a page without Prometheus shows at least these. Names are
those of the alerts, so that docs/runbook.md has an entry for each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

NO_PROGRESS_S = 900.0
NO_PROGRESS_ITERATIONS = 3
KL_HIGH = 0.1
ENTROPY_COLLAPSED = 0.05
NOTHING_TO_LEARN = 0.9
DISK_FULL = 0.05
REWARD_COLLAPSED = 0.5
# Iterations over which a curve is averaged, so that a single bad one is no alarm.
_AVERAGED = 10


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Something that needs a person; `name` is its entry in the runbook, "" for none."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is looked at.

    Attributes:
        state: of the run.
        standstill_s: since a part of an iteration began or ended.
        rows: newest iterations last.
        announced, serving: replicas by name.
        poisoned: replicas whose last round left them so.
        failed_rounds: among the last rounds.
        disk_free: share of the run folder's disk.
    """

    state: str
    error: str
    standstill_s: float
    rows: Sequence[Mapping[str, float]]
    logprob_diff_limit: float
    announced: Sequence[str]
    serving: Sequence[str]
    poisoned: Sequence[str]
    failed_rounds: int
    disk_free: float


def alerts(now: Conditions) -> list[Alert]:
    """What is wrong now, the worst first."""
    return [*_of_the_run(now), *_of_the_fleet(now), *_of_the_training(now)]


def _of_the_run(now: Conditions) -> Iterator[Alert]:
    if now.state == "failed":
        yield Alert(name="TandemServiceDown", text=f"The run has failed: {now.error}")
    usual_s = _mean(now.rows, "iteration_s") or 0.0
    if now.state == "running" and now.standstill_s > max(NO_PROGRESS_S, NO_PROGRESS_ITERATIONS * usual_s):
        yield Alert(name="TandemNoProgress", text=f"Nothing has moved for {now.standstill_s / 60:.0f} minutes.")
    if now.disk_free < DISK_FULL:
        yield Alert(name="TandemDiskFull", text=f"{now.disk_free:.1%} of the run folder's disk is free.")


def _of_the_fleet(now: Conditions) -> Iterator[Alert]:
    for name in now.poisoned:
        yield Alert(name="TandemReplicaPoisoned", text=f"{name} holds partly written weights and does not serve.")
    idle = [name for name in now.announced if name not in now.serving and name not in now.poisoned]
    if idle and now.state == "running":
        yield Alert(name="TandemReplicaNotServing", text=f"{', '.join(idle)}: there, but gets no work.")
    if now.failed_rounds:
        yield Alert(name="TandemWeightSyncFailing", text=f"{now.failed_rounds} of the last rounds were given up.")


def _of_the_training(now: Conditions) -> Iterator[Alert]:
    if not now.rows:
        return
    difference = now.rows[-1].get("logprob_abs_diff_max", 0.0)
    if difference > now.logprob_diff_limit:
        yield Alert(
            name="TandemLogprobMismatch",
            text=f"Trainer and engine log-probs differ by {difference:.3g} (limit {now.logprob_diff_limit:g}).",
        )
    if len(now.rows) < _AVERAGED:
        return
    kl, entropy, equal = (_mean(now.rows, field) for field in ("kl_old", "entropy", "zero_variance_ratio"))
    if kl is not None and kl > KL_HIGH:
        yield Alert(name="TandemKLHigh", text=f"KL(old || new) averages {kl:.3g} per token.")
    if entropy is not None and entropy < ENTROPY_COLLAPSED:
        yield Alert(name="TandemEntropyCollapsed", text=f"Token entropy averages {entropy:.3g} nats.")
    if equal is not None and equal > NOTHING_TO_LEARN:
        yield Alert(name="TandemNothingToLearn", text=f"{equal:.0%} of the groups have equal rewards.")
    yield from _of_the_reward(now)


def _of_the_reward(now: Conditions) -> Iterator[Alert]:
    # Whole blocks from the newest back, so that the last one is what the run earns now.
    ends = range(len(now.rows), _AVERAGED - 1, -_AVERAGED)
    means = [_mean(now.rows[end - _AVERAGED : end], "reward_mean") or 0.0 for end in ends]
    if means[0] < REWARD_COLLAPSED * max(means):
        yield Alert(
            name="TandemRewardCollapsed", text=f"The mean reward is {means[0]:.3g}; it has been {max(means):.3g}."
        )


def _mean(rows: Sequence[Mapping[str, float]], field: str) -> float | None:
    """Over the newest iterations."""
    values = [row[field] for row in rows[-_AVERAGED:] if field in row]
    return sum(values) / len(values) if values else None
