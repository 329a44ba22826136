"""Prints a run: start-up, one line per iteration, warnings, and the outcome."""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from launcher.report import PipeSafeConsole
from launcher.view.metric_columns import columns_for, heading, line, rewards_line
from tandem_files.metrics_file import reward_means
from tandem_files.pace import clock

_ROWS_PER_HEADING = 20
LeftS = Callable[[Sequence[Mapping[str, float | None]]], float | None]


class RunView:
    """Prints a run; on a terminal a spinner shows the current activity, elsewhere there are only whole lines.

    Args:
        left_s: estimates the seconds that the run still takes from its rows; None: unknown.
        weights: of the rewards, by name, in the order in which they are shown.
    """

    def __init__(
        self,
        console: Console,
        total_iterations: int,
        left_s: LeftS = lambda _: None,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._console, self._total, self._left_s = console, total_iterations, left_s
        if isinstance(console, PipeSafeConsole):
            console.continues = "the run continues (see: tandem status)"
        self._weights = weights
        # What a terminal cuts off can be looked up; of a file it would be lost.
        self._width = console.width if console.is_terminal else sys.maxsize
        self._columns = columns_for(self._width, total_iterations)
        self._rows: list[Mapping[str, float | None]] = []
        self._left = ""
        self._status: Status | None = None

    def print_line(self, text: str, style: str = "") -> None:
        """Print a line."""
        self._console.print(Text(text, style=style))

    def doing(self, text: str) -> None:
        """Show the current activity next to the spinner; does nothing without a terminal."""
        if not self._console.is_terminal:
            return
        if self._left:
            text = f"{text}; about {self._left} left"
        if self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))

    def ready(self, name: str, seconds: float) -> None:
        """Print that a service is announced."""
        self.print_line(f"  {name} is up after {seconds:.1f} s", "green")

    def iteration(self, row: Mapping[str, float | None]) -> None:
        """Print the figures of an iteration, a row of metrics.jsonl."""
        if len(self._rows) % _ROWS_PER_HEADING == 0:
            # An event's row has no order; parts of scores come by name.
            means = reward_means(dict(sorted(row.items())), self._weights)
            self._columns = columns_for(self._width, self._total, means, self._weights)
            self.print_line(heading(self._columns, self._total), "bold")
        self._rows.append(row)
        left_s = self._left_s(self._rows)
        self._left = clock(left_s) if left_s else ""
        self.print_line(line(self._columns, row, self._total, self._left or "-"))
        if rewards := rewards_line(self._columns, row, self._total, self._width, self._weights):
            self.print_line(rewards, "dim")

    def warning(self, text: str) -> None:
        """Print a warning."""
        self.print_line(f"warning: {text}", "yellow")

    def close(self) -> None:
        """Remove the spinner; printed lines stay."""
        if self._status is not None:
            self._status.stop()
            self._status = None
