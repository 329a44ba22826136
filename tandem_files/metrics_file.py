"""metrics.jsonl: a row per iteration, written by the coordinator, read by launcher and tools.

Row 0 is the evaluation before the first iteration: it has the columns of evaluations, and none of training. Older
releases did not write it.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tandem_files.atomic import append_json, naming, no_check, write_bytes_atomic
from tandem_files.metrics_table import ACCURACY

METRICS_FILE = "metrics.jsonl"
Row = dict[str, float | int | None]
# Newest rows of which a process that follows a run keeps each. A run of a week has 100,000, of 6 KiB as objects.
RECENT_ROWS = 1_000
# Neighbours among the older ones: windows of iterations that are averaged have as many.
_BLOCK = 10
# The mean of each reward's own scores, and of each part that a server gives.
REWARD_MEAN = re.compile(r"reward/(.+)_mean")
R = TypeVar("R", bound=Mapping[str, Any])
_OF_SET = re.compile(r"eval/(?P<name>[^/]+)/.+|(?P<heldout>heldout)_.+")


class MetricsFile:
    """The file metrics.jsonl: appended row by row, cut back on a resume."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, row: Row, before_write: Callable[[], None] = no_check) -> None:
        """Append a row atomically, as append_json; after `sync` it survives a power cut."""
        append_json(self._path, row, before_write)

    def sync(self) -> None:
        """Force all rows to disk. Raises: OSError: with the file's name."""
        with naming(self._path), self._path.open("ab") as file:
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """Read the rows of iterations, without row 0, and without lines that a crash has torn."""
        return [row for row in self.with_baseline() if row["iteration"] != 0]

    def with_baseline(self) -> list[Row]:
        """Read all complete rows, row 0 first if there is one."""
        if not self._path.exists():
            return []
        rows: list[Row] = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("iteration"), int):
                rows.append(row)
        return rows

    def cut_after(self, iteration: int, before_write: Callable[[], None] = no_check) -> int:
        """Remove rows after `iteration`, and torn ones, atomically. Returns: how many rows up to it are missing.

        A run that begins anew, at 0, keeps none: it measures its baseline again.
        """
        kept = [row for row in self.with_baseline() if (row["iteration"] or 0) <= iteration and iteration > 0]
        content = "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept).encode()
        write_bytes_atomic(self._path, content, before_write)
        return iteration - sum(row["iteration"] != 0 for row in kept)


def thin_rows(rows: list[R]) -> None:
    """Leave old rows out, evenly in blocks of neighbours, as soon as there are 3 * RECENT_ROWS; at most 2 of 3 stay.

    >>> rows = [{"iteration": number} for number in range(1, 6001)]
    >>> thin_rows(rows)
    >>> len(rows), [row["iteration"] for row in rows[8:12]]
    (1629, [9, 80, 81, 82])
    """
    if len(rows) <= 3 * RECENT_ROWS:
        return
    newest, scored = int(rows[-1]["iteration"]), [row for row in rows if ACCURACY in row][-1:]
    recent, every = rows[-RECENT_ROWS:], _BLOCK << (newest // RECENT_ROWS).bit_length()
    old = [row for row in rows[:-RECENT_ROWS] if row["iteration"] % every < _BLOCK or row in scored]
    rows[:] = [*old, *recent]


def set_of(column: str) -> str | None:
    """Return the evaluation set that a column is of; None: it is of none.

    >>> set_of("eval/aime/mean@8"), set_of("heldout_accuracy"), set_of("reward_mean")
    ('aime', 'heldout', None)
    """
    found = _OF_SET.fullmatch(column)
    return None if found is None else found["name"] or found["heldout"]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Where the curves of evaluation sets begin.

    Attributes:
        row: columns of the evaluation before the training; of a set that a resume changed, of the one at the resume.
        renewed: the iterations of those resumes, by the set.
    """

    row: Mapping[str, float | None] = field(default_factory=dict)
    renewed: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Baseline":
        """Read it from a run's state, of any release."""
        row = {ACCURACY: state.get("initial_accuracy")} | dict(state.get("baseline") or {})
        return cls(row=row, renewed=dict(state.get("renewed") or {}))

    def begin(self, column: str, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Put a column's baseline in front of its curve, in place of what was measured on another set of the name.

        >>> Baseline(row={"eval/a/mean@1": 0.5}, renewed={"a": 4}).begin("eval/a/mean@1", [(2, 0.9), (6, 0.7)])
        [(4, 0.5), (6, 0.7)]
        """
        since = self.renewed.get(set_of(column) or "", 0)
        first = self.row.get(column)
        return [*([] if first is None else [(since, first)]), *(point for point in points if point[0] > since)]

    def comparable(self, row: Row) -> Row:
        """Return a row without the columns of sets that were others then."""
        number = row["iteration"] or 0
        gone = {name for name, since in self.renewed.items() if number <= since}
        return {column: value for column, value in row.items() if set_of(column) not in gone} if gone else row


def score_text(value: float) -> str:
    """Write a score of any scale for a person.

    >>> [score_text(value) for value in (0.5, -5.25, 2e-5, 123456.789, -1e12)]
    ['0.500', '-5.250', '2e-05', '1.235e+05', '-1e+12']
    """
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Heldout:
    """What a run keeps of the evaluations of data.heldout.

    Attributes:
        initial: mean score before the first iteration, the accuracy where scores are 0 or 1; None: not measured.
        std: largest standard deviation of an evaluation's scores; None: not known.
        title: "held-out accuracy", or "held-out reward" where a score was neither 0 nor 1.
    """

    initial: float | None = None
    std: float | None = None
    title: str = "held-out accuracy"

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Heldout":
        """Read it from a run's state or summary, of any release.

        >>> Heldout.of_state({"initial_accuracy": -0.5}).title
        'held-out reward'
        """
        means = [state.get(f"{name}_accuracy") for name in ("initial", "last", "final", "best")]
        # Older releases do not say whether it is a share of right completions.
        possible = all(mean is None or 0 <= mean <= 1 for mean in means)
        is_share = possible and state.get("accuracy_is_share", True)
        std = state.get("accuracy_std")
        if std is None and is_share and means[0] is not None:
            std = 0.5  # of scores of 0 and 1 the most; older releases, and a single prompt, do not say it
        return cls(initial=means[0], std=std, title="held-out accuracy" if is_share else "held-out reward")


def reward_means(row: Mapping[str, float | None], order: Iterable[str] = ()) -> dict[str, float | None]:
    """Return the mean scores of a row by reward, then those of parts; nothing if there is only one reward.

    Args:
        order: names of rewards that come first, for a row that has lost its own order; it has the accuracy first, then
            the other rewards as they are configured.

    >>> row = {"reward_mean": 0.7, "reward/tidy_mean": 1.0, "reward/tidy_std": 0.0, "reward/math_mean": 0.5}
    >>> reward_means(row), reward_means(row, ["math", "none"])
    ({'tidy': 1.0, 'math': 0.5}, {'math': 0.5, 'tidy': 1.0})
    """
    found = {found[1]: row[name] for name in row if (found := REWARD_MEAN.fullmatch(name))}
    means = {name: found[name] for name in dict.fromkeys([*order, *found]) if name in found}
    return means if len(means) > 1 else {}


def is_weighted(reward: float | None, scores: Iterable[float | None]) -> bool:
    """Whether a reward is another number than the sum of its scores, which have no weights then.

    >>> is_weighted(0.09, [0.0, 0.3]), is_weighted(0.3, [0.0, 0.3]), is_weighted(None, [0.3])
    (True, False, False)
    """
    return reward is not None and not math.isclose(reward, sum(score or 0.0 for score in scores), abs_tol=1e-6)
