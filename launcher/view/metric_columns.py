"""The columns of the progress view: which of them a narrow terminal has, and their texts."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from tandem_files.metrics_file import REWARD_MEAN, reward_means, score_text
from tandem_files.metrics_table import METRICS, Column

_GAP = "  "
# The estimated time that the run still takes; no metric of a row.
LEFT = "left"
_LONGEST_TITLE = 16
_SCORE = ".3f"
# What a row says as a share, and the view in per cent.
_SHARES = frozenset(metric.name for metric in METRICS if metric.unit == "share")
COLUMNS = (
    *(metric.column._replace(metric=metric.name) for metric in METRICS if metric.column is not None),
    Column(LEFT, "", 7, metric=LEFT),
)


def columns_for(
    width: int, total: int, rewards: Iterable[str] = (), weights: Mapping[str, float] = MappingProxyType({})
) -> list[Column]:
    """Choose the columns for lines of at most `width` characters; those of rank 0 are always among them.

    Args:
        width: sys.maxsize: of a file, where nothing is cut.
        rewards: names of a list of rewards; they get columns if there is room for all of them.
        weights: of rewards, by name; the figures are not multiplied by them.
    """
    longest = _LONGEST_TITLE if width < sys.maxsize else sys.maxsize
    chosen = [COLUMNS[0], *(_of_reward(name, weights, longest) for name in rewards), *COLUMNS[1:]]
    if len(heading([column for column in chosen if column.rank == 0], total)) > width:
        chosen = list(COLUMNS)
    for rank in sorted({column.rank for column in chosen} - {0}, reverse=True):
        if len(heading(chosen, total)) <= width:
            break
        chosen = [column for column in chosen if column.rank < rank]
    return chosen


def rewards_line(
    columns: Sequence[Column],
    row: Mapping[str, float | None],
    total: int,
    width: int,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """Format the mean score of each reward, and its weight unless it is 1, for a line of its own.

    Args:
        weights: as for columns_for, in the order of the line.
    Returns: "" if the columns have them, or there is only one.
    """
    means = reward_means(row, weights)
    if not means or any(REWARD_MEAN.fullmatch(column.metric) for column in columns):
        return ""
    texts = [
        f"{name} {'-' if mean is None else score_text(mean)}{factor(name, weights)}" for name, mean in means.items()
    ]
    text = " " * _first_width(total) + _GAP + _GAP.join(texts)
    return text if len(text) <= width else f"{text[: width - 1]}\N{HORIZONTAL ELLIPSIS}"


def factor(name: str, weights: Mapping[str, float]) -> str:
    """Return the factor that turns a reward's score into its part of the sum; "" for 1, or an unknown one."""
    weight = weights.get(name, 1.0)
    return "" if weight == 1.0 else f" x {weight:g}"


def _of_reward(name: str, weights: Mapping[str, float], longest: int) -> Column:
    title = name if len(name) <= longest else f"{name[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"
    title += factor(name, weights)
    return Column(title, _SCORE, max(6, len(title)), metric=f"reward/{name}_mean")


def heading(columns: Sequence[Column], total: int) -> str:
    """Return the line above the figures. total: iterations of the run."""
    return _GAP.join(["iter".rjust(_first_width(total)), *(column.title.rjust(column.width) for column in columns)])


def line(columns: Sequence[Column], row: Mapping[str, float | None], total: int, left: str = "-") -> str:
    """Format the figures of an iteration; a metric that was not measured is a dash.

    Args:
        row: a row of metrics.jsonl.
        total: iterations of the run.
        left: time that the run still takes.
    """
    iteration = row.get("iteration")
    first = "-" if iteration is None else f"{iteration:.0f}{_of(total)}"
    return _GAP.join([first.rjust(_first_width(total)), *(_cell(column, row, left) for column in columns)])


def _first_width(total: int) -> int:
    return max(len("iter"), len(f"{total}{_of(total)}"))


def _of(total: int) -> str:
    """Return what follows the number of an iteration: nothing where it would cost a narrow terminal a column."""
    return f"/{total}" if total < 1000 else ""


def _cell(column: Column, row: Mapping[str, float | None], left: str) -> str:
    if column.metric == LEFT:
        return left.rjust(column.width)
    value = row.get(column.metric)
    if value is None:
        return "-".rjust(column.width)
    value *= 100 if column.metric in _SHARES else 1
    # A reward of hundreds, of thousands, of millions loses its decimals, not its place.
    forms = (column.form, ".1f", ".0f", ".0e") if column.form == _SCORE else (column.form,)
    texts = [format(value, form) for form in forms]
    return next((text for text in texts if len(text) <= column.width), texts[-1]).rjust(column.width)
