"""Renders a board as Grafana's JSON, with Grafana's builder (grafana-foundation-sdk)."""

import itertools

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    ScaleDistribution,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableHide,
    VariableOption,
    VariableRefresh,
)

from tools.dashboards.panels import Board, Panel

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WINDOWS = ("5m", "15m", "1h", "6h")
_HEIGHT = 8


def render(board: Board) -> str:
    """Render the content of a dashboard's file."""
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
        .with_variable(_namespace())
        .with_variable(_window())
    )
    ids = itertools.count(1)
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            built = built.with_panel(_panel(panel).id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _namespace() -> dashboard.QueryVariable:
    """Make the variable that selects the run by its namespace; without the label there is only "All"."""
    return (
        dashboard.QueryVariable("namespace")
        .label("Namespace")
        .datasource(_SOURCE)
        .query("label_values(tandem_iteration, namespace)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
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


def _panel(panel: Panel) -> timeseries.Panel:
    drawn = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.help)
        .datasource(_SOURCE)
        .unit({"nats": "none"}.get(panel.unit, panel.unit))
        .height(_HEIGHT)
        .span(panel.width)
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
    for place, series in enumerate(panel.series):
        query = prometheus.Dataquery().expr(series.expr).legend_format(series.legend).ref_id(chr(ord("A") + place))
        drawn = drawn.with_target(query.datasource(_SOURCE))
    return drawn
