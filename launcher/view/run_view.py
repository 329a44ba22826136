"""What the user sees of a run: start-up, one line per iteration, warnings, and the end."""

import contextlib
import os
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.status import Status
from rich.text import Text

from launcher.view.metric_columns import heading, line

_ROWS_PER_HEADING = 20


class _SturdyConsole(Console):
    """Goes on without a reader: `tandem run | head` must not end the training."""

    def on_broken_pipe(self) -> None:
        """rich's own would end the process, without a word."""
        self.quiet = True
        stream = sys.stderr if self.stderr else sys.stdout
        with contextlib.suppress(OSError, ValueError):
            # Python's own flush at the exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not self.stderr:
            with contextlib.suppress(OSError, ValueError):
                print("the reader of this output has gone; going on without it (see: tandem status)", file=sys.stderr)


def make_console(*, stderr: bool = False) -> Console:
    """A console that writes plain lines, without control codes or wrapping, when it is not a terminal."""
    return _SturdyConsole(stderr=stderr, highlight=False, soft_wrap=True)


class RunView:
    """Prints a run. On a terminal a spinner says what is going on now; elsewhere there are only whole lines."""

    def __init__(self, console: Console, total_iterations: int) -> None:
        self._console, self._total = console, total_iterations
        self._rows = 0
        self._status: Status | None = None

    def say(self, text: str, style: str = "") -> None:
        """A line that stays."""
        self._console.print(Text(text, style=style))

    def doing(self, text: str) -> None:
        """What is going on now; nothing is printed where there is no terminal."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))

    def ready(self, name: str, seconds: float) -> None:
        """A process has announced itself."""
        self.say(f"  {name} is up after {seconds:.1f} s", "green")

    def iteration(self, row: Mapping[str, float | None]) -> None:
        """One line of figures."""
        if self._rows % _ROWS_PER_HEADING == 0:
            self.say(heading(), "bold")
        self._rows += 1
        self.say(line(row, self._total))

    def warning(self, text: str) -> None:
        """Something that needs a person's eye."""
        self.say(f"warning: {text}", "yellow")

    def close(self) -> None:
        """Remove the spinner; lines stay."""
        if self._status is not None:
            self._status.stop()
            self._status = None
