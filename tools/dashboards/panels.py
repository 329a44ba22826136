"""The parts of a dashboard, as data."""

from dataclasses import dataclass
from typing import Literal

from tandem_files.metrics_table import BY_NAME

# Every query selects the run that is looked at; "All" also matches series without the label (compose).
RUN = 'namespace=~"$namespace", tandem_run_id=~"$run"'
COORDINATOR = f'job="coordinator", {RUN}'
TRAINER = f'job="trainer", {RUN}'
REPLICA = 'replica=~"$replica"'
ROLLOUT = f'job="rollout", {RUN}, {REPLICA}'

# graph: lines over time; stat: the present value of each series as a number; heatmap: of a histogram's buckets.
Kind = Literal["graph", "stat", "heatmap"]
Unit = Literal["s", "bytes", "Bps", "percentunit", "short", "none", "reqps", "nats"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A query; `legend` names its results, with {{label}} for a label's value."""

    expr: str
    legend: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A graph, numbers, or a heatmap.

    Attributes:
        help: what it shows and how to read it.
        alert: the alert whose entry of the runbook says what to do; "" for none.
        stacked: as areas on each other, for parts of a whole.
        width: columns, of 24.
    """

    title: str
    help: str
    unit: Unit
    series: tuple[Series, ...]
    kind: Kind = "graph"
    alert: str = ""
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
    kind: Kind = "graph",
    alert: str = "",
    stacked: bool = False,
    logarithmic: bool = False,
) -> Panel:
    """Make a panel; its arguments read like a line of a table."""
    return Panel(
        title=title,
        help=help,
        unit=unit,
        series=series,
        kind=kind,
        alert=alert,
        stacked=stacked,
        logarithmic=logarithmic,
    )


_UNITS: dict[str, Unit] = {"share": "percentunit", "nats": "nats", "bytes": "bytes", "s": "s"}


def figure(name: str, reading: str = "", *, title: str = "", alert: str = "", logarithmic: bool = False) -> Panel:
    """Make the panel of a metric of the table (tandem_files/metrics_table.py).

    Args:
        reading: how to read it, after the table's own words.
        title: in place of that of its curve on the page.
    """
    metric = BY_NAME[name]
    exported, selector = (metric.exported, COORDINATOR) if metric.exported else (metric.trainer, TRAINER)
    return panel(
        title or metric.title,
        f"{metric.help} {reading}".strip(),
        gauge(exported, title or metric.title, selector),
        unit=_UNITS.get(metric.unit, "short"),
        alert=alert,
        logarithmic=logarithmic,
    )


def heatmap(title: str, help: str, metric: str, selector: str = COORDINATOR) -> Panel:
    """Make a heatmap of a histogram of seconds: how many observations of which duration, over time."""
    buckets = f"sum by (le) (increase({metric}_bucket{{{selector}}}[$__rate_interval]))"
    return Panel(title=title, help=help, unit="s", series=(Series(expr=buckets, legend="{{le}}"),), kind="heatmap")


def gauge(metric: str, legend: str, selector: str = COORDINATOR) -> Series:
    """Make a query for a metric's values, a line per series."""
    return Series(expr=f"{metric}{{{selector}}}", legend=legend)


def increase(metric: str, legend: str, selector: str = COORDINATOR, by: str = "") -> Series:
    """Make a query for a counter's growth within $window."""
    return Series(expr=f"sum{_grouped(by)} (increase({metric}{{{selector}}}[$window]))", legend=legend)


def rate(metric: str, legend: str, selector: str = COORDINATOR, by: str = "") -> Series:
    """Make a query for a counter's growth per second, over $window."""
    return Series(expr=f"sum{_grouped(by)} (rate({metric}{{{selector}}}[$window]))", legend=legend)


def percentile(share: float, metric: str, legend: str, selector: str = COORDINATOR, by: str = "") -> Series:
    """Make a query for a percentile of a histogram over $window. share: 0 to 1."""
    labels = f"{by}, le" if by else "le"
    buckets = f"sum by ({labels}) (rate({metric}_bucket{{{selector}}}[$window]))"
    return Series(expr=f"histogram_quantile({share}, {buckets})", legend=legend)


def percentiles(metric: str, *shares: float, selector: str = COORDINATOR, by: str = "") -> tuple[Series, ...]:
    """Make queries for percentiles of a histogram, named p50, p95, ..., after the value of the label `by`."""
    name = f"{{{{{by}}}}} " if by else ""
    return tuple(percentile(share, metric, f"{name}p{share * 100:g}", selector, by) for share in shares)


def mean(metric: str, legend: str, selector: str = COORDINATOR, by: str = "") -> Series:
    """Make a query for a histogram's mean over $window."""
    parts = [rate(f"{metric}_{part}", legend, selector, by).expr for part in ("sum", "count")]
    return Series(expr=" / ".join(parts), legend=legend)


def _grouped(by: str) -> str:
    return f" by ({by})" if by else ""
