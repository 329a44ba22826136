"""Prints a run: start-up, one line per iteration, warnings, and the outcome."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from launcher.view.metric_columns import columns_for, heading, line, rewards_line
from tandem_files.metrics_file import reward_means
from tandem_files.pace import clock

_ROWS_PER_HEADING = 20
LeftS = Callable[[Sequence[Mapping[str, float | None]]], float | None]


def _unknown(_: Sequence[Mapping[str, float | None]]) -> float | None:
    return None


class _PipeSafeConsole(Console):
    """A console that survives the end of its reader: `tandem run | head` must not end the training."""

    def __init__(self, *, ends_with_reader: bool, **options: Any) -> None:
        super().__init__(**options)
        self._ends_with_reader = ends_with_reader
        # What continues without a reader.
        self.continues = "the command continues"

    def on_broken_pipe(self) -> None:
        """Discard further output; end the process without a message where there is nothing but the output."""
        if self._ends_with_reader:
            super().on_broken_pipe()
        self.quiet = True
        stream = sys.stderr if self.stderr else sys.stdout
        with contextlib.suppress(OSError, ValueError):
            # Python's flush at exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not self.stderr:
            with contextlib.suppress(OSError, ValueError):
                print(f"output closed by its reader; {self.continues}", file=sys.stderr)


def make_console(*, stderr: bool = False, ends_with_reader: bool = False) -> Console:
    """Make a console; when it is not a terminal, it writes plain lines without control codes or wrapping.

    Args:
        ends_with_reader: end the process when whoever reads the output has ended, as `head` does; else continue.
    """
    return _PipeSafeConsole(ends_with_reader=ends_with_reader, stderr=stderr, highlight=False, soft_wrap=True)


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
        left_s: LeftS = _unknown,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._console, self._total, self._left_s = console, total_iterations, left_s
        if isinstance(console, _PipeSafeConsole):
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
