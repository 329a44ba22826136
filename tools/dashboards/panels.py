"""What a dashboard consists of, as data."""

from dataclasses import dataclass
from typing import Literal

# Every query is about the run that is looked at; where there is no label (compose), "All" matches that too.
RUN = 'namespace=~"$namespace"'
COORDINATOR = f'job="coordinator", {RUN}'
TRAINER = f'job="trainer", {RUN}'
ROLLOUT = f'job="rollout", {RUN}'

Unit = Literal["s", "bytes", "Bps", "percentunit", "short", "none", "reqps", "nats"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One query; `legend` names what it returns, with {{label}} for a label's value."""

    expr: str
    legend: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One graph.

    Attributes:
        help: what it shows and what to make of it.
        stacked: areas on each other: only for parts of a whole.
        width: of 24 columns.
    """

    title: str
    help: str
    unit: Unit
    series: tuple[Series, ...]
    stacked: bool = False
    logarithmic: bool = False
    width: int = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Board:
    """A dashboard; its file is `<uid>.json`."""

    uid: str
    title: str
    help: str
    rows: tuple[Row, ...]


def percentile(share: float, metric: str, selector: str, by: str = "") -> str:
    """The query of a percentile of a histogram over $window."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}[$window])))"


def mean(metric: str, selector: str, by: str = "") -> str:
    """The query of a histogram's mean over $window."""
    group = f" by ({by})" if by else ""
    parts = [f"sum{group} (rate({metric}_{part}{{{selector}}}[$window]))" for part in ("sum", "count")]
    return " / ".join(parts)
