"""The page's data as one JSON object: of a running run (snapshot.py), or of a run's folder (folder.py)."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.web.history import History, Row
from tandem_files.metrics_file import REWARD_MEAN, STEP_PARTS, Baseline, Heldout

# Fields of metrics.jsonl that are drawn, in the page's order, with their titles and units.
CURVES = (
    ("reward_mean", "Reward", ""),
    ("heldout_accuracy", "Held-out accuracy", ""),
    ("reward_std", "Reward, standard deviation", ""),
    ("zero_variance_ratio", "Groups of equal rewards", "share"),
    ("response_length_mean", "Completion length", "tokens"),
    ("truncated_ratio", "Cut off", "share"),
    ("entropy", "Entropy", "nats"),
    ("kl_old", "KL(old || new)", "nats"),
    ("loss", "Loss", ""),
    ("grad_norm", "Gradient norm", ""),
    ("learning_rate", "Learning rate", ""),
    ("clip_fraction_high", "Clipped above", "share"),
    ("clip_fraction_low", "Clipped below", "share"),
    ("logprob_abs_diff_mean", "Log-prob mismatch, mean", "nats"),
    ("logprob_abs_diff_p999", "Log-prob mismatch, 99.9 %", "nats"),
    ("logprob_abs_diff_max", "Log-prob mismatch, max", "nats"),
    ("tokens_per_s", "Tokens per second", ""),
    ("train_tokens_per_s", "Trainer, tokens per second", ""),
    ("model_flops_utilization", "Trainer, share of peak FLOP/s", "share"),
    ("train_peak_memory_bytes", "Trainer, peak memory of a rank", "bytes"),
    ("packing_efficiency", "Packing efficiency", "share"),
    ("prompt_sharing", "Tokens left by shared prompts", "share"),
    ("iteration_s", "Iteration", "s"),
    ("sync_s", "Weight sync", "s"),
)
# Fields of rows that depend on the configuration beside scores by reward: measures of evaluation sets (`mean@4`).
_OF_SET = re.compile(r"eval/(.+)/([a-z]+@\d+)")
_MOST_FURTHER = 24
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
# The curve that is drawn with a line at its baseline.
_HELDOUT = "heldout_accuracy"
_CURRENT = ("reward_mean", _HELDOUT, "tokens_per_s", "sync_s", "iteration_s", "logprob_abs_diff_max")
# Parts of an iteration; seconds in the rows' fields of these names and `_s`.
PARTS = ("generate", "reward", "reference", "batch", "train", "sync", "evaluate", "checkpoint", "report")
_ITERATIONS_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A run at one moment.

    Attributes:
        now_s: Unix time, as all times.
        part: of the iteration that is running.
        awaited: names of services that have not announced themselves.
        left_s: estimate of the seconds that the run still takes; None: there is none.
        arrived: by name, seconds from the coordinator's start to their announcement.
        replicas, syncs, alerts, messages: as watch.observed, web.conditions and web.history have them.
    """

    now_s: float
    run: str
    state: str
    error: str
    iteration: int
    total_iterations: int
    policy_version: int
    worked_s: float
    history: History
    left_s: float | None = None
    heldout: Heldout = field(default_factory=Heldout)
    baseline: Baseline = field(default_factory=Baseline)
    best_accuracy: float | None = None
    part: str = ""
    part_since_s: float = 0.0
    awaited: Sequence[str] = ()
    arrived: Mapping[str, float] = field(default_factory=dict)
    replicas: Sequence[Mapping[str, Any]] = ()
    syncs: Sequence[Mapping[str, Any]] = ()
    alerts: Sequence[Mapping[str, Any]] = ()
    messages: Sequence[Mapping[str, Any]] = ()

    def plain(self) -> dict[str, Any]:
        """Make the JSON object: numbers, strings, lists and objects of these."""
        shown = list(self.history.rows)[-_ITERATIONS_SHOWN:]
        return {
            "now_s": self.now_s,
            "run": self.run,
            "state": self.state,
            "error": self.error,
            "part": self.part,
            "part_since_s": self.part_since_s,
            "iteration": self.iteration,
            "total_iterations": self.total_iterations,
            "policy_version": self.policy_version,
            "worked_s": self.worked_s,
            "left_s": self.left_s,
            "current": {name: self.history.last(name) for name in _CURRENT},
            "initial_accuracy": self.heldout.initial,
            "heldout_title": self.heldout.title,
            "best_accuracy": self.best_accuracy,
            "curves": [self._curve(name, title, unit) for name, title, unit in (*CURVES, *further(self.history.names))],
            "iterations": [_parts(row) for row in shown],
            "train_steps": [_step_parts(row) for row in shown if row.get("train_s")],
            "awaited": list(self.awaited),
            "arrived": dict(self.arrived),
            "replicas": list(self.replicas),
            "syncs": list(self.syncs),
            "alerts": list(self.alerts),
            "messages": list(self.messages),
        }

    def _curve(self, name: str, title: str, unit: str) -> dict[str, Any]:
        points = self.baseline.begin(name, self.history.curve(name))
        start = self.heldout.initial if name == _HELDOUT else None
        title = self.heldout.title.capitalize() if name == _HELDOUT else title
        if unit == "bytes":
            unit, points = _in_units(points)
        return {"field": name, "title": title, "unit": unit, "points": points, "start": start}


def _in_units(points: Sequence[tuple[float, float]]) -> tuple[str, list[tuple[float, float]]]:
    """Return bytes in the unit in which the largest is at least 1, which comes first.

    >>> _in_units([(1, 2.0**29), (2, 3 * 2.0**30)])
    ('GiB', [(1, 0.5), (2, 3.0)])
    """
    largest = max((value for _, value in points), default=0.0)
    power = max(power for power in range(len(_UNITS)) if power == 0 or largest >= 1024**power)
    return _UNITS[power], [(iteration, value / 1024**power) for iteration, value in points]


def further(names: Collection[str]) -> list[tuple[str, str, str]]:
    """Find the fields of rows that are drawn beside CURVES, with titles and units; rewards in the rows' order.

    >>> further(["reward/math_mean", "reward/math_std", "reward/format_mean", "eval/aime/pass@8", "loss"])
    [('reward/math_mean', 'Reward: math (unweighted)', ''), ('reward/format_mean', 'Reward: format (unweighted)', ''), \
('eval/aime/pass@8', 'aime: pass@8', '')]
    """
    rewards = [(name, f"Reward: {found[1]}", "") for name in names if (found := REWARD_MEAN.fullmatch(name))]
    if len(rewards) > 1:  # the reward is a sum, in which each has a weight
        rewards = [(name, f"{title} (unweighted)", unit) for name, title, unit in rewards]
    sets = [(name, f"{found[1]}: {found[2]}", "") for name in sorted(names) if (found := _OF_SET.fullmatch(name))]
    return [*rewards, *sets][:_MOST_FURTHER]


def _parts(row: Row) -> dict[str, Any]:
    """Return the seconds of an iteration by part; what is in no part is `other`."""
    parts = {part: row[f"{part}_s"] for part in PARTS if row.get(f"{part}_s")}
    return _divided(row, parts, row.get("iteration_s", sum(parts.values())))


def _step_parts(row: Row) -> dict[str, Any]:
    """Return the seconds of an iteration's train step by part; `other` is the call of the trainer around it."""
    parts = {part: row[f"train_{part}_s"] for part in STEP_PARTS if row.get(f"train_{part}_s")}
    return _divided(row, parts, row["train_s"])


def _divided(row: Row, parts: Mapping[str, float], total_s: float) -> dict[str, Any]:
    other_s = total_s - sum(parts.values())
    return {"iteration": row["iteration"], "total_s": total_s, "parts": {**parts, "other": other_s}}
