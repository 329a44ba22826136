"""Prints the entries of several logs in the order of their times, and follows them as they grow."""

import heapq
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.report import make_console, reporting
from launcher.view.logs.lines import LEVELS, Entry, parse
from launcher.view.status import current_run
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_OK
from tandem_files.run_folder import is_locked

# Pause between two looks at logs that may have grown.
FOLLOW_S = 0.5
_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@reporting()
def logs_command(
    run_dir: Path | None, services: Sequence[str], *, level: str, since: str, newest: int | None, follow: bool
) -> int:
    """Run `tandem logs`. run_dir: None: the current run. Returns: the exit code."""
    folder = current_run() if run_dir is None else run_dir
    since_s = time_of(since, time.time()) if since else 0.0
    wanted = WantedLines(services=services, level=level, since_s=since_s, newest=newest)
    show(folder, make_console(ends_with_reader=True), wanted, partial(is_locked, folder) if follow else None)
    return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class WantedLines:
    """What to print.

    Attributes:
        services: names of log files, or their beginnings before a dash (`rollout`); empty: all.
        level: the lowest level.
        since_s: Unix seconds.
        newest: at most so many of the newest entries; None: all.
    """

    services: Sequence[str] = ()
    level: str = "debug"
    since_s: float = 0.0
    newest: int | None = None

    def has(self, entry: Entry) -> bool:
        """Whether to print the entry."""
        return entry.time_s >= self.since_s and LEVELS.index(entry.level) >= LEVELS.index(self.level)


@dataclass
class _Log:
    """A log file, read as far as it has complete lines."""

    path: Path
    at: int = 0
    time_s: float = 0.0

    def entries(self) -> list[Entry]:
        """Read what has been added since the last call."""
        with self.path.open("rb") as file:
            file.seek(self.at)
            content = file.read()
        # A line that is being written is read when it is complete.
        complete = content[: content.rfind(b"\n") + 1]
        self.at += len(complete)
        found = list(parse(self.path.stem, complete.decode(errors="replace").split("\n"), self.time_s))
        self.time_s = found[-1].time_s if found else self.time_s
        return found


def find_logs(run_dir: Path, services: Sequence[str]) -> list[Path]:
    """Find the logs of these services; of all, if none is named.

    Raises: ConfigError: there are no logs, or none of a service that is named.
    """
    found = sorted((run_dir / "logs").glob("*.log"))
    if not found:
        raise ConfigError(f"{run_dir} has no logs/*.log: give the folder of a run that `tandem run` has started")
    for name in services:
        if not any(_is_of(path, name) for path in found):
            raise ConfigError(f"there is no log of {name!r} in {run_dir}; there are {', '.join(p.stem for p in found)}")
    return [path for path in found if not services or any(_is_of(path, name) for name in services)]


def time_of(text: str, now_s: float) -> float:
    """Read `--since`: a time ago (`90s`, `10m`, `2h`, `1d`) or a local time (`14:30`, `2026-05-01 14:30`).

    Returns: Unix seconds.
    Raises: ConfigError: it is neither.

    >>> time_of("10m", 1000.0)
    400.0
    """
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip()):
        return now_s - float(ago[1]) * _UNITS[ago[2]]
    today = datetime.fromtimestamp(now_s).strftime("%Y-%m-%d")
    for candidate in (text.strip(), f"{today} {text.strip()}"):
        try:
            return datetime.fromisoformat(candidate).astimezone().timestamp()
        except ValueError:
            continue
    raise ConfigError(f"--since {text}: give a time ago (90s, 10m, 2h, 1d) or a local time (14:30, 2026-05-01 14:30)")


def show(run_dir: Path, console: Console, wanted: WantedLines, is_running: Callable[[], bool] | None = None) -> None:
    """Print the logs of a run.

    Args:
        is_running: whether the run is, so that more may come; when it is not, the logs are read once more.
    Raises: ConfigError: as find_logs.
    """
    logs: dict[Path, _Log] = {}

    def gained() -> Iterator[list[Entry]]:
        for path in find_logs(run_dir, wanted.services):  # of a service that was started meanwhile too
            yield logs.setdefault(path, _Log(path)).entries()

    print_entries(console, wanted, gained, is_running, FOLLOW_S)


def print_entries(
    console: Console,
    wanted: WantedLines,
    gained: Callable[[], Iterable[Sequence[Entry]]],
    is_running: Callable[[], bool] | None,
    pause_s: float,
) -> None:
    """Print what logs have gained, by time; of one log in its own order, because some clocks have whole seconds.

    Args:
        gained: reads the new entries of each log.
        is_running: whether more may come; when it may not, the logs are read once more. None: do not follow.
    """
    most, ends = wanted.newest, False
    while True:
        merged = heapq.merge(*gained(), key=lambda entry: entry.time_s)
        for entry in deque((entry for entry in merged if wanted.has(entry)), maxlen=most):
            print_entry(console, entry)
        if ends or is_running is None:
            return
        most, ends = None, not is_running()
        time.sleep(pause_s)


def _is_of(path: Path, service: str) -> bool:
    return path.stem == service or path.stem.rpartition("-")[0] == service


def print_entry(console: Console, entry: Entry) -> None:
    """Print an entry: time, service, level, text, and the lines that belong to it."""
    clock = datetime.fromtimestamp(entry.time_s).strftime("%m-%d %H:%M:%S.%f")[:-3] if entry.time_s else "-" * 18
    line = Text(f"{clock}  ", style="dim")
    line.append(f"{entry.service:<11}  ", style="not dim bold")
    line.append(f"{entry.level:<7}  ", style=f"not dim {_STYLES.get(entry.level, '')}")
    line.append(entry.text, style="not dim")
    console.print(line)
    for more in entry.more:
        console.print(Text(f"    {more}"))
