"""Reads the runs to compare: their rows, how they stand, and their settings."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from servicekit.errors import ConfigError
from tandem_files.metrics_file import Baseline, Row
from tandem_files.metrics_table import BY_NAME
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_folder import metrics_rows, read_state

# What a run records of own code (coordinator/record/resuming.py): its configuration does not say it.
_CODE = re.compile(r"(?P<owner>.*): code of (?P<place>.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """A run, as far as it has got.

    Attributes:
        label: tells it apart from the others.
        total: run.iterations.
        settings: its configuration without the rewards, by dotted key.
        rewards: the settings of each reward by dotted key, by the reward's name.
        code: digests of own files by name, of each reward and the environment; None: an older release has none.
    """

    label: str
    rows: Sequence[Row]
    status: str
    total: int
    baseline: Baseline
    settings: dict[str, Any]
    rewards: dict[str, dict[str, Any]]
    code: dict[str, dict[str, str]] | None
    troubles: tuple[str, ...]

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Return (iteration, value) where the metric was measured; of evaluation sets, the baseline first."""
        found = [(row["iteration"] or 0, value) for row in self.rows if (value := row.get(metric)) is not None]
        return [(int(number), float(value)) for number, value in self.baseline.begin(metric, found)]

    def median_of(self, metric: str) -> float | None:
        """Return the median of a figure over all iterations; None if it was never measured."""
        values = [value for _, value in self.points(metric)]
        return median(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a table says of a metric of a run; `best_at` is its iteration."""

    first: float
    final: float
    best: float
    best_at: int
    mean: float


def read_runs(folders: Sequence[Path]) -> list[RunCurves]:
    """Read the runs in these folders. Raises: ConfigError: a folder is not a run's."""
    absolute = [folder.absolute() for folder in folders]
    names = [folder.name for folder in absolute]
    twice = next((folder for place, folder in enumerate(absolute) if folder in absolute[:place]), None)
    if twice is not None:
        raise ConfigError(f"{twice} is given twice: compare it with another run")
    # Runs of one name in two folders have the folders in their labels.
    labels = [
        folder.name if names.count(folder.name) == 1 else f"{folder.parent.name}/{folder.name}" for folder in absolute
    ]
    return [_read(folder, label) for folder, label in zip(folders, labels, strict=True)]


def begun(runs: Sequence[RunCurves]) -> tuple[list[RunCurves], list[RunCurves]]:
    """Separate the runs that have an iteration from those without one. Raises: ConfigError: none has one."""
    some = [run for run in runs if run.rows]
    if not some:
        names = ", ".join(run.label for run in runs)
        raise ConfigError(f"nothing to compare: no finished iteration yet in {names} (see: tandem status RUN_DIR)")
    return some, [run for run in runs if not run.rows]


def check_metrics(runs: Sequence[RunCurves], metrics: Sequence[str]) -> None:
    """Check that each metric was measured in one of the runs. Raises: ConfigError: names it, and what there is."""
    rows = [row for run in runs for row in (*run.rows, run.baseline.row)]
    known = sorted({name for row in rows for name, value in row.items() if value is not None})
    for metric in metrics:
        if metric not in known:
            close = difflib.get_close_matches(metric, known, 1, 0.5)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"--metric {metric}: no run has measured it; {hint}")


def curve_of(run: RunCurves, metric: str, last: int) -> Curve | None:
    """Sum a metric up; None if the run has not measured it. last: number of newest values in the mean."""
    points = run.points(metric)
    if not points:
        return None
    # Measures of evaluation sets have the names of rows' fields, after the set.
    known = BY_NAME.get(metric.rpartition("/")[2].removeprefix("heldout_"))
    better = min if known is not None and (known.less or known.unit == "s") else max
    best_at, best = better(points, key=lambda point: point[1])
    newest = [value for _, value in points[-last:]]
    return Curve(first=points[0][1], final=points[-1][1], best=best, best_at=best_at, mean=fmean(newest))


def _read(folder: Path, label: str) -> RunCurves:
    try:
        config = yaml.safe_load((folder / RESOLVED_CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = f"it has no {RESOLVED_CONFIG}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{folder} is not a run's folder: {why}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder / RESOLVED_CONFIG} cannot be read: {error}") from None
    rows, state = metrics_rows(folder), read_state(folder)
    rewards = _rewards_of(config.pop("reward", None))
    settings = dict(_flat("", config))
    return RunCurves(
        label=label,
        rows=rows,
        status=str(state.get("status", "unknown")),
        total=int(settings.get("run.iterations") or 0),
        baseline=Baseline.of_state(state),
        settings=settings,
        rewards=rewards,
        code=_code_of(state.get("rewards")),
        troubles=(*map(str, state.get("troubles") or ()), *_renewals(state.get("renewed") or {})),
    )


def _renewals(renewed: Mapping[str, int]) -> list[str]:
    return [
        f"evaluation set {name} has changed: its figures begin with iteration {number}"
        for name, number in renewed.items()
    ]


def _rewards_of(section: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of each reward by its name, whether the configuration has one or a list of them."""
    entries = [entry for entry in (section if isinstance(section, list) else [section]) if isinstance(entry, dict)]
    return {_label(entry): dict(_flat("", entry)) for entry in entries}


def _label(entry: Mapping[str, Any]) -> str:
    """Return the name of a reward in metrics and messages (tandem_config/sections/reward.py)."""
    return str(entry.get("name") or str(entry.get("function", "")).rpartition(":")[2] or entry.get("kind"))


def _code_of(recorded: Any) -> dict[str, dict[str, str]] | None:
    """Return digests of files by name, by whose they are; None if nothing is recorded."""
    if not isinstance(recorded, dict) or not recorded:
        return None
    found: dict[str, dict[str, str]] = {}
    for key, digest in recorded.items():
        if match := _CODE.fullmatch(key):
            found.setdefault(match["owner"], {})[Path(match["place"]).name] = str(digest)
    return found


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [
            pair for name, inner in value.items() for pair in _flat(f"{prefix}.{name}" if prefix else str(name), inner)
        ]
    return [(prefix, value)]
