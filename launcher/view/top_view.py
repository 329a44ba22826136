"""Draws a coordinator's overview as terminal tables, in the terms and order of the web page; pure functions."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_BAR_WIDTH = 30
# Stages of a weight sync, in the order of a round.
_STAGES = ("rendezvous", "prepare", "pause", "transfer", "install", "verify", "commit")
_ROUNDS_SHOWN = 8
_MESSAGES_SHOWN = 6
_OUTCOME_STYLES = {"committed": "green", "aborted": "yellow", "poisoned": "bold red"}
_STATE_STYLES = {"running": "bold green", "failed": "bold red", "finished": "bold green"}

Overview = Mapping[str, Any]


def draw(overview: Overview) -> RenderableType:
    """Draw one overview of a run.

    Args:
        overview: GetOverviewResponse.overview; times are Unix seconds of the coordinator's clock.
    """
    parts = [_head(overview), _alerts(overview), _curves(overview), _fleet(overview), _syncs(overview)]
    return Group(*(part for part in [*parts, _messages(overview)] if part is not None))


def sparkline(points: Sequence[Sequence[float]], width: int = _SPARK_WIDTH) -> str:
    """Draw the newest `width` of (iteration, value) points as bars between their least and greatest value.

    >>> sparkline([(1, 0.0), (2, 0.5), (3, 1.0)])
    '▁▄█'
    """
    values = [point[1] for point in points[-width:]]
    if not values:
        return ""
    least, span = min(values), max(values) - min(values)
    return "".join(_BARS[int((value - least) / span * (len(_BARS) - 1)) if span else 0] for value in values)


def _head(overview: Overview) -> RenderableType:
    state, done, total = str(overview["state"]), overview["iteration"], overview["total_iterations"]
    line = Text.assemble(
        (str(overview["run"]), "bold"), "  ", (state, _STATE_STYLES.get(state, "bold")), f"  iteration {done:.0f} of "
    )
    line.append(f"{total:.0f}, policy version {overview['policy_version']:.0f}")
    if state == "running" and overview["part"]:
        line.append(f", {overview['part']} for {overview['now_s'] - overview['part_since_s']:.0f} s")
    if overview["error"]:
        line.append(f"\n{overview['error']}", "red")
    return Group(line, ProgressBar(total=max(1.0, total), completed=done, width=_BAR_WIDTH), Text())


def _alerts(overview: Overview) -> RenderableType | None:
    alerts = overview["alerts"]
    if not alerts:
        return None
    return Text("\n".join(f"! {a['name'] or 'trouble'}: {a['text']}" for a in alerts) + "\n", style="bold red")


def _curves(overview: Overview) -> RenderableType | None:
    drawn = [curve for curve in overview["curves"] if curve["points"]]
    if not drawn:
        return None
    table = _table("", "now", "", "newest iterations")
    for curve in drawn:
        table.add_row(curve["title"], f"{curve['points'][-1][1]:.4g}", curve["unit"], sparkline(curve["points"]))
    return table


def _fleet(overview: Overview) -> RenderableType | None:
    if not overview["replicas"]:
        return None
    table = _table("replica", "", "version", "sync s", "last round", "starts")
    for row in overview["replicas"]:
        state, style = _replica_state(row)
        table.add_row(
            row["name"],
            Text(state, style),
            _number(row["policy_version"], ".0f"),
            _number(row["sync_s"], ".3f"),
            Text(row["outcome"] or "-", _OUTCOME_STYLES.get(row["outcome"], "")),
            _number(row["starts"], ".0f"),
        )
    return table


def _replica_state(row: Mapping[str, Any]) -> tuple[str, str]:
    if not row["there"]:
        return "lost", "red"
    return ("serving", "green") if row["serving"] else ("no work", "yellow")


def _syncs(overview: Overview) -> RenderableType | None:
    rounds = overview["syncs"][-_ROUNDS_SHOWN:]
    if not rounds:
        return None
    stages = [stage for stage in _STAGES if any(stage in sync["stages"] for sync in rounds)]
    table = _table("weight sync", "total ms", *(f"{stage} ms" for stage in stages), "MiB", "tries")
    for sync in reversed(rounds):
        version = f"version {sync['policy_version']:.0f}"
        if sync["error"]:
            table.add_row(Text(f"{version} given up", "red"), *["-"] * len(stages), "-", "-", "-")
            continue
        milliseconds = [_number(sync["stages"].get(stage), ".1f", 1e3) for stage in stages]
        mib = _number(sync["bytes_received"], ".1f", 2**-20)
        table.add_row(version, _number(sync["total_s"], ".1f", 1e3), *milliseconds, mib, f"{sync['attempts']:.0f}")
    return table


def _messages(overview: Overview) -> RenderableType | None:
    messages = overview["messages"][-_MESSAGES_SHOWN:]
    if not messages:
        return None
    text = Text()
    for message in messages:
        clock = time.strftime("%H:%M:%S", time.localtime(message["time_s"]))
        text.append(f"{clock}  {message['text']}\n", "yellow" if message["kind"] == "warning" else "")
    return text


def _table(*titles: str) -> Table:
    """Make a table: the first column is text, the others are figures; cells are not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place == 0 or title == "newest iterations" else "right", no_wrap=True)
    return table


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)
