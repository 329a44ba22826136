"""Draws a coordinator's overview as terminal tables, in the terms and order of the web page; pure functions."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.report import number_text, table_of
from tandem_files.pace import clock as duration

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_BAR_WIDTH = 30
# Stages of a weight sync, in the order of a round.
_STAGES = (
    *("roll_call", "prepare", "rendezvous", "pause", "transfer", "verify", "install", "commit"),
    "retries",
    "other",
)
_NARROWEST = 80
# Characters of a line of the curves without its bars, and of a line of the syncs without its stages.
_BESIDE_SPARKS, _BESIDE_STAGES = 46, 44
_HEADED = ("curves", "replicas", "syncs")
_LEAST = {"curves": 4, "replicas": 2, "syncs": 1, "messages": 2}
_ROUNDS_SHOWN = 8
_MESSAGES_SHOWN = 6
_OUTCOME_STYLES = {"committed": "green", "aborted": "yellow", "poisoned": "bold red"}
_STATE_STYLES = {"running": "bold green", "failed": "bold red", "finished": "bold green"}

Overview = Mapping[str, Any]


@dataclass(frozen=True)
class Drawing:
    """A drawing of one overview, which fits the width it is given, and the height if it is given one.

    Attributes:
        overview: GetOverviewResponse.overview; times are Unix seconds of the coordinator's clock.
    """

    overview: Overview

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw head and alerts, then as much of each other part as there is room for."""
        overview, width = self.overview, max(options.max_width, _NARROWEST)
        head = [part for part in (_head(overview), _alerts(overview)) if part is not None]
        yield from head
        wanted = {
            "curves": len(_measured(overview)),
            "replicas": len(overview["replicas"]),
            "syncs": min(_ROUNDS_SHOWN, len(overview["syncs"])),
            "messages": min(_MESSAGES_SHOWN, len(overview["messages"])),
        }
        rows = wanted
        if options.height is not None:
            room = options.height - sum(
                len(console.render_lines(part, options.reset_height(), pad=False)) for part in head
            )
            headings = sum(1 for name in _HEADED if wanted[name])
            rows = fitting(wanted, _LEAST, room - headings)
        if rows["curves"]:
            yield _curves(overview, rows["curves"], width)
        if rows["replicas"]:
            yield _fleet(overview, rows["replicas"])
        if rows["syncs"]:
            yield _syncs(overview, rows["syncs"], width)
        if rows["messages"]:
            yield _messages(overview, rows["messages"], width if options.height is not None else None)


def fitting(wanted: Mapping[str, int], least: Mapping[str, int], room: int) -> dict[str, int]:
    """Share the lines of a window out: each part gets its least, then the one that lacks most gets the next.

    >>> fitting({"curves": 10, "messages": 6}, {"curves": 4, "messages": 2}, 12)
    {'curves': 7, 'messages': 5}
    """
    given = {name: min(number, least[name]) for name, number in wanted.items()}
    while sum(given.values()) < room and given != wanted:
        name = max(wanted, key=lambda name: (wanted[name] - given[name]) / max(1, wanted[name]))
        given[name] += 1
    return given


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
    pace = Table.grid(padding=(0, 2))
    pace.add_row(ProgressBar(total=max(1.0, total), completed=done, width=_BAR_WIDTH), _pace(overview))
    return Group(line, pace, Text())


def _pace(overview: Overview) -> str:
    """Say how long the run still takes, and how fast it generates, as far as that is known."""
    left_s = overview.get("left_s")
    speed = (overview.get("current") or {}).get("tokens_per_s")
    left = [f"about {duration(left_s)} left"] if left_s is not None and overview["state"] == "running" else []
    return ", ".join([*left, *([f"{speed:,.0f} tokens/s"] if speed is not None else [])])


def _alerts(overview: Overview) -> RenderableType | None:
    alerts = overview["alerts"]
    if not alerts:
        return None
    return Text("\n".join(f"! {a['name'] or 'trouble'}: {a['text']}" for a in alerts) + "\n", style="bold red")


def _measured(overview: Overview) -> list[Mapping[str, Any]]:
    return [curve for curve in overview["curves"] if curve["points"]]


def _curves(overview: Overview, rows: int, width: int) -> RenderableType:
    table = table_of("", "now", "", "newest iterations", texts=["newest iterations"], header_style="dim")
    for curve in _measured(overview)[:rows]:
        line = sparkline(curve["points"], min(_SPARK_WIDTH, width - _BESIDE_SPARKS))
        table.add_row(curve["title"], f"{curve['points'][-1][1]:.4g}", curve["unit"], line)
    return table


def _fleet(overview: Overview, rows: int) -> RenderableType:
    """Draw the replicas; where there is no room for all, those that do not serve come first."""
    table = table_of("replica", "", "version", "sync s", "last round", "starts", header_style="dim")
    replicas = list(overview["replicas"])
    if rows < len(replicas):
        replicas.sort(key=lambda row: bool(row["there"] and row["serving"]))
    for row in replicas[:rows]:
        state, style = _replica_state(row)
        table.add_row(
            row["name"],
            Text(state, style),
            number_text(row["policy_version"], ".0f"),
            number_text(row["sync_s"], ".3f"),
            Text(row["outcome"] or "-", _OUTCOME_STYLES.get(row["outcome"], "")),
            number_text(row["starts"], ".0f"),
        )
    return table


def _replica_state(row: Mapping[str, Any]) -> tuple[str, str]:
    if not row["there"]:
        return "lost", "red"
    return ("serving", "green") if row["serving"] else ("no work", "yellow")


def _syncs(overview: Overview, rows: int, width: int) -> RenderableType:
    """Draw the last weight syncs; where there is no room for all stages, the longest ones and the sum of the others."""
    rounds = overview["syncs"][-rows:]
    stages = [stage for stage in _STAGES if any(stage in sync["stages"] for sync in rounds)]
    shown = stages
    if _BESIDE_STAGES + sum(len(stage) + 2 for stage in stages) > width:
        longest = sorted(stages, key=lambda stage: max(sync["stages"].get(stage, 0.0) for sync in rounds))[-3:]
        shown = [stage for stage in stages if stage in longest]
    others = ["others"] if shown != stages else []
    table = table_of("weight sync, ms", "total", *shown, *others, "MiB", "tries", header_style="dim")
    for sync in reversed(rounds):
        version = f"version {sync['policy_version']:.0f}" + (", joiner" if sync.get("source") else "")
        if sync["error"]:
            table.add_row(Text(f"{version} given up", "red"), *["-"] * (len(shown) + len(others)), "-", "-", "-")
            continue
        milliseconds = [number_text(sync["stages"].get(stage), ".1f", 1e3) for stage in shown]
        if others:
            left = sum(value for stage, value in sync["stages"].items() if stage not in shown)
            milliseconds.append(number_text(left, ".1f", 1e3))
        mib = number_text(sync["bytes_received"], ".1f", 2**-20)
        table.add_row(version, number_text(sync["total_s"], ".1f", 1e3), *milliseconds, mib, f"{sync['attempts']:.0f}")
    return table


def _messages(overview: Overview, rows: int, width: int | None) -> RenderableType:
    """Draw the last messages, each cut to one line of `width`; None: whole."""
    text = Text()
    for message in overview["messages"][-rows:]:
        clock = time.strftime("%H:%M:%S", time.localtime(message["time_s"]))
        line = Text(f"{clock}  {message['text']}", "yellow" if message["kind"] == "warning" else "")
        if width is not None:
            line.truncate(width, overflow="ellipsis")
        text.append_text(line).append("\n")
    text.rstrip()
    return text
