"""The page's data as one JSON object: of a running run (snapshot.py), or of a run's folder (folder.py)."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.record.health import Trouble
from coordinator.web.alerts import Conditions, alerts
from coordinator.web.history import History, Row
from tandem_files.ledger.life import LifeEntry
from tandem_files.metrics_file import REWARD_MEAN, Baseline
from tandem_files.metrics_table import ACCURACY, ITERATION_PARTS, METRICS, STEP_PARTS, Metric

# Fields of metrics.jsonl that are drawn, in the page's order, with their titles and units.
CURVES = tuple((metric.name, metric.title, metric.unit) for metric in METRICS if metric.title)
# Fields of rows that depend on the configuration besides scores by reward: measures of evaluation sets (`mean@4`).
_OF_SET = re.compile(r"eval/(.+)/([a-z]+@\d+)")
_MOST_FURTHER = 24
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_ITERATIONS_SHOWN = 16
# Attributes of a picture that are sent as they are.
_SENT = (
    *("now_s", "run", "state", "error", "part", "part_since_s", "iteration", "total_iterations", "policy_version"),
    *("worked_s", "left_s", "awaited", "arrived", "replicas", "syncs", "timeline", "messages"),
)


@dataclass(frozen=True, kw_only=True)
class Picture(Conditions):
    """A run at one moment; replicas, syncs and messages as fleet_recorder and history have them."""

    now_s: float  # Unix time, as all times
    run: str
    iteration: int
    total_iterations: int
    policy_version: int
    worked_s: float
    history: History
    left_s: float | None = None  # estimate of the seconds that the run still takes
    baseline: Baseline = field(default_factory=Baseline)
    part: str = ""  # of the iteration that is running
    part_since_s: float = 0.0
    awaited: Sequence[str] = field(default_factory=list)  # services that have not announced themselves
    arrived: Mapping[str, float] = field(default_factory=dict)  # others, after how many seconds
    replicas: Sequence[Mapping[str, Any]] = field(default_factory=list)
    syncs: Sequence[Mapping[str, Any]] = field(default_factory=list)
    timeline: Mapping[str, Any] | None = None  # of timeline.py; None: not known
    messages: Sequence[Mapping[str, Any]] = field(default_factory=list)
    life: Sequence[LifeEntry] = ()  # the newest last
    more_alerts: Sequence[Trouble] = ()  # those that do not follow from the conditions

    def plain(self) -> dict[str, Any]:
        """Make the JSON object: numbers, strings, lists and objects of these."""
        shown = self.rows[-_ITERATIONS_SHOWN:]
        return {
            **{name: getattr(self, name) for name in _SENT},
            "life": [[one.time_s, one.who, one.kind, one.why, one.seconds, one.tokens] for one in self.life],
            "life_totals": dict(self.life[-1].totals) if self.life else {},
            "current": {name: self.history.last(name) for name, _, _ in CURVES},
            "tiles": [self._tile(metric) for metric in METRICS if metric.tile],
            "heldout_title": self.heldout.title,
            "curves": [
                self._curve(name, title, unit) for name, title, unit in (*CURVES, *extra_curves(self.history.names))
            ],
            "iterations": [_divided(row, "iteration_s", "", ITERATION_PARTS) for row in shown],
            "train_steps": [_divided(row, "train_s", "train_", STEP_PARTS) for row in shown if row.get("train_s")],
            "alerts": [{"name": one.name, "text": one.text} for one in (*alerts(self), *self.more_alerts)],
        }

    def _tile(self, metric: Metric) -> dict[str, Any]:
        title = self.heldout.title if metric.name == ACCURACY else metric.tile
        value, start = self.history.last(metric.name), self._start(metric.name)
        return {"title": title, "value": value, "start": start, "help": metric.help}

    def _start(self, name: str) -> float | None:
        return self.heldout.initial if name == ACCURACY else None

    def _curve(self, name: str, title: str, unit: str) -> dict[str, Any]:
        points = self.baseline.begin(name, self.history.curve(name))
        title = self.heldout.title.capitalize() if name == ACCURACY else title
        if unit == "bytes":
            unit, points = _in_units(points)
        return {"field": name, "title": title, "unit": unit, "points": points, "start": self._start(name)}


def _in_units(points: Sequence[tuple[float, float]]) -> tuple[str, list[tuple[float, float]]]:
    """Return bytes in the unit in which the largest is at least 1, which comes first.

    >>> _in_units([(1, 2.0**29), (2, 3 * 2.0**30)])
    ('GiB', [(1, 0.5), (2, 3.0)])
    """
    largest = max((value for _, value in points), default=0.0)
    power = max(power for power in range(len(_UNITS)) if power == 0 or largest >= 1024**power)
    return _UNITS[power], [(iteration, value / 1024**power) for iteration, value in points]


def extra_curves(names: Collection[str]) -> list[tuple[str, str, str]]:
    """Find the fields of rows that are drawn besides CURVES, with titles and units; rewards in the rows' order.

    >>> extra_curves(["reward/math_mean", "reward/math_std", "reward/format_mean", "eval/aime/pass@8", "loss"])
    [('reward/math_mean', 'Reward: math (unweighted)', ''), ('reward/format_mean', 'Reward: format (unweighted)', ''), \
('eval/aime/pass@8', 'aime: pass@8', '')]
    """
    rewards = [(name, f"Reward: {found[1]}", "") for name in names if (found := REWARD_MEAN.fullmatch(name))]
    if len(rewards) > 1:  # the reward is a sum, in which each has a weight
        rewards = [(name, f"{title} (unweighted)", unit) for name, title, unit in rewards]
    sets = [(name, f"{found[1]}: {found[2]}", "") for name in sorted(names) if (found := _OF_SET.fullmatch(name))]
    return [*rewards, *sets][:_MOST_FURTHER]


def _divided(row: Row, total: str, prefix: str, names: Sequence[str]) -> dict[str, Any]:
    """Return seconds by part, from the fields PREFIX_NAME_s; `other` is what is in no part of the field `total`."""
    parts = {part: seconds for part in names if (seconds := row.get(f"{prefix}{part}_s"))}
    total_s = row.get(total, sum(parts.values()))
    parts["other"] = total_s - sum(parts.values())
    return {"iteration": row["iteration"], "total_s": total_s, "parts": parts}
