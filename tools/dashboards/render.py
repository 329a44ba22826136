"""Renders a board as Grafana's JSON, with Grafana's builder (grafana-foundation-sdk)."""

import itertools
from typing import TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    ScaleDistribution,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableHide,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tools.dashboards.panels import RUN, Board, Panel

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WINDOWS = ("5m", "15m", "1h", "6h")
_HEIGHT = 8

_Drawn: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel


def render(board: Board, runbook: str) -> str:
    """Render the content of a dashboard's file.

    Args:
        runbook: address of docs/runbook.md, as the alerts have it.
    """
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags(["tandem"])
        .timezone("browser")
        .time("now-3h", "now")
        .refresh("30s")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_choice("namespace", "Namespace", "label_values(tandem_iteration, namespace)"))
        .with_variable(_run())
        .with_variable(
            _choice("replica", "Replica", f"label_values(tandem_replica_state{{{RUN}}}, replica)", several=True)
        )
        .with_variable(_window())
        .annotation(_alerts())
        .link(_boards())
        .link(_runbook("Runbook", runbook))
    )
    ids = itertools.count(1)
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            built = built.with_panel(_panel(panel, runbook).id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _choice(name: str, label: str, query: str, *, several: bool = False) -> dashboard.QueryVariable:
    """Make a variable that selects by the values of a label; without the label there is only "All"."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(several)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _run() -> dashboard.QueryVariable:
    """Make the variable that selects one run: quantiles over several runs say nothing of any of them."""
    return (
        dashboard.QueryVariable("run")
        .label("Run")
        .datasource(_SOURCE)
        .query('label_values(tandem_iteration{namespace=~"$namespace"}, tandem_run_id)')
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(False)
    )


def _alerts() -> dashboard.AnnotationQuery:
    """Make the marks of the times at which an alert of the run fired."""
    return (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(_SOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f'ALERTS{{alertname=~"Tandem.*", alertstate="firing", {RUN}}}')
    )


def _boards() -> dashboard.DashboardLink:
    """Make the links to the other boards, for the same run and time."""
    return (
        dashboard.DashboardLink("Boards")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["tandem"])
        .include_vars(True)
        .keep_time(True)
    )


def _runbook(title: str, address: str) -> dashboard.DashboardLink:
    """Make a link into the runbook."""
    return (
        dashboard.DashboardLink(title)
        .type(DashboardLinkType.LINK)
        .url(address)
        .tooltip("Its address is set by python -m tools.prometheus_rule --runbook URL")
        .target_blank(True)
    )


def _window() -> dashboard.CustomVariable:
    """Make the variable for the window of rates and percentiles: shorter than an iteration, it leaves gaps."""
    options = [VariableOption(selected=window == "15m", text=window, value=window) for window in _WINDOWS]
    return (
        dashboard.CustomVariable("window")
        .label("Window")
        .hide(VariableHide.DONT_HIDE)
        .values(",".join(_WINDOWS))
        .options(options)
        .current(VariableOption(selected=True, text="15m", value="15m"))
    )


def _panel(panel: Panel, runbook: str) -> _Drawn:
    drawn = _draw(panel)
    drawn = drawn.title(panel.title).description(panel.help).datasource(_SOURCE).height(_HEIGHT).span(panel.width)
    if panel.alert:
        drawn = drawn.links([_runbook(panel.alert, f"{runbook}#{panel.alert.lower()}")])
    for place, series in enumerate(panel.series):
        query = prometheus.Dataquery().expr(series.expr).legend_format(series.legend).ref_id(chr(ord("A") + place))
        if panel.kind == "heatmap":
            query = query.format(PromQueryFormat.HEATMAP)
        # Traces of single observations, where Prometheus stores them (docs/monitoring.md).
        query = query.exemplar("_bucket{" in series.expr)
        drawn = drawn.with_target(query.datasource(_SOURCE))
    return drawn


def _draw(panel: Panel) -> _Drawn:
    match panel.kind:
        case "graph":
            return _graph(panel)
        case "stat":
            return _stat(panel)
        case "heatmap":
            return _heatmap(panel)


def _unit(panel: Panel) -> str:
    return {"nats": "none"}.get(panel.unit, panel.unit)


def _stat(panel: Panel) -> stat.Panel:
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().unit(_unit(panel)).reduce_options(newest).graph_mode(BigValueGraphMode.AREA)


def _heatmap(panel: Panel) -> heatmap.Panel:
    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(colours)
        .cell_gap(0)
        .y_axis(heatmap.YAxisConfig().unit(_unit(panel)))
        .hide_legend()
    )


def _graph(panel: Panel) -> timeseries.Panel:
    drawn = (
        timeseries.Panel()
        .unit(_unit(panel))
        .line_width(1)
        .fill_opacity(10 if panel.stacked else 0)
        .show_points(VisibilityMode.AUTO)
        .span_nulls(True)
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if panel.stacked:
        drawn = drawn.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if panel.logarithmic:
        drawn = drawn.scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    return drawn
