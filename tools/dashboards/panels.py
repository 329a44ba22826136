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


def panel(
    title: str,
    help: str,
    *series: Series,
    unit: Unit = "none",
    stacked: bool = False,
    logarithmic: bool = False,
) -> Panel:
    """A panel in a form that is read like a line of a table."""
    return Panel(title=title, help=help, unit=unit, series=series, stacked=stacked, logarithmic=logarithmic)


def gauge(metric: str, legend: str, selector: str = COORDINATOR) -> Series:
    """What a metric says, a line for each of its series."""
    return Series(expr=f"{metric}{{{selector}}}", legend=legend)


def increase(metric: str, legend: str, selector: str = COORDINATOR, by: str = "") -> Series:
    """By how much a counter has grown within $window."""
    return Series(expr=f"sum{_grouped(by)} (increase({metric}{{{selector}}}[$window]))", legend=legend)


def rate(metric: str, legend: str, selector: str = COORDINATOR, by: str = "") -> Series:
    """A counter's growth per second, over $window."""
    return Series(expr=f"sum{_grouped(by)} (rate({metric}{{{selector}}}[$window]))", legend=legend)


def percentile(share: float, metric: str, legend: str, selector: str = COORDINATOR, by: str = "") -> Series:
    """A percentile of a histogram over $window."""
    labels = f"{by}, le" if by else "le"
    buckets = f"sum by ({labels}) (rate({metric}_bucket{{{selector}}}[$window]))"
    return Series(expr=f"histogram_quantile({share}, {buckets})", legend=legend)


def percentiles(metric: str, *shares: float, selector: str = COORDINATOR, by: str = "") -> tuple[Series, ...]:
    """Several percentiles of a histogram, named p50, p95, ..., after the label's value where there is one."""
    name = f"{{{{{by}}}}} " if by else ""
    return tuple(percentile(share, metric, f"{name}p{share * 100:g}", selector, by) for share in shares)


def mean(metric: str, legend: str, selector: str = COORDINATOR, by: str = "") -> Series:
    """A histogram's mean over $window."""
    parts = [rate(f"{metric}_{part}", legend, selector, by).expr for part in ("sum", "count")]
    return Series(expr=" / ".join(parts), legend=legend)


def _grouped(by: str) -> str:
    return f" by ({by})" if by else ""
