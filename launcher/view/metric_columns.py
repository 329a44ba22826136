"""The columns of the progress view: metric, heading, number of digits."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the progress view.

    Attributes:
        metric: key in metrics.jsonl.
        form: format of the number.
        width: in characters.
    """

    title: str
    metric: str
    form: str
    width: int


COLUMNS = (
    Column(title="reward", metric="reward_mean", form=".3f", width=6),
    Column(title="held-out", metric="heldout_accuracy", form=".3f", width=8),
    Column(title="length", metric="response_length_mean", form=".1f", width=6),
    Column(title="entropy", metric="entropy", form=".3f", width=7),
    Column(title="|dlogp|", metric="logprob_abs_diff_max", form=".1e", width=7),
    Column(title="tokens/s", metric="tokens_per_s", form=".0f", width=8),
    Column(title="gen s", metric="generate_s", form=".2f", width=6),
    Column(title="train s", metric="train_s", form=".2f", width=7),
    Column(title="sync s", metric="sync_s", form=".3f", width=6),
    Column(title="version", metric="policy_version", form=".0f", width=7),
)
_FIRST_WIDTH = 9


def heading() -> str:
    """Return the line above the figures."""
    return "  ".join(["iteration".rjust(_FIRST_WIDTH), *(column.title.rjust(column.width) for column in COLUMNS)])


def line(row: Mapping[str, float | None], total: int) -> str:
    """Format the figures of an iteration; a metric that was not measured is a dash.

    Args:
        row: a row of metrics.jsonl.
        total: iterations of the run.
    """
    iteration = row.get("iteration")
    first = f"{iteration:.0f}/{total}" if iteration is not None else "-"
    return "  ".join([first.rjust(_FIRST_WIDTH), *(_cell(column, row.get(column.metric)) for column in COLUMNS)])


def _cell(column: Column, value: float | None) -> str:
    return ("-" if value is None else format(value, column.form)).rjust(column.width)
