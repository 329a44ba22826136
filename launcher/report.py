"""What commands print: configuration problems, errors, tables; and the consoles that they print it to."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec

from rich.console import Console
from rich.table import Table
from rich.text import Text

from servicekit.errors import ConfigError, TandemError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED
from tandem_config.problems import ConfigErrors, ConfigProblem, errors_only

P = ParamSpec("P")


class PipeSafeConsole(Console):
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
    return PipeSafeConsole(ends_with_reader=ends_with_reader, stderr=stderr, highlight=False, soft_wrap=True)


def reporting(
    before: str = "", *, usage: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Make a command print the errors that end it, and return their exit code.

    Args:
        before: what stands before an error.
        usage: errors that the user can correct, besides ConfigError: exit code 2, not 1.
    """

    theirs: tuple[type[Exception], ...] = (ConfigError, *usage)

    def decorate(command: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            complaints = make_console(stderr=True)
            try:
                return command(*args, **kwargs)
            except ConfigErrors as errors:
                print_problems(complaints, errors.problems)
                complaints.print(Text(headline(errors.problems), style="bold red"))
                return EXIT_BAD_CONFIG
            except theirs as error:
                complaints.print(Text(f"{before}{error}", style="bold red"))
                return EXIT_BAD_CONFIG
            except (TandemError, OSError) as error:
                complaints.print(Text(f"{before}{error}", style="bold red"))
                return EXIT_FAILED

        return run

    return decorate


def print_pairs(console: Console, pairs: Sequence[tuple[str, str]], style: str = "") -> None:
    """Print names, right-aligned and in this style, and texts."""
    width = max(len(name) for name, _ in pairs)
    for name, text in pairs:
        console.print(Text.assemble((f"{name.rjust(width)}  ", style), text))


def number_text(value: float | None, form: str, scale: float = 1.0) -> str:
    """Format a figure; a dash: it was not measured."""
    return "-" if value is None else format(value * scale, form)


def table_of(*titles: str, texts: Collection[str] = (), wraps: bool = False, header_style: str = "bold") -> Table:
    """Make a table of figures behind a first column of texts.

    Args:
        texts: titles of further columns that are texts.
        wraps: whether cells behind the first one may be folded.
    """
    table = Table(box=None, pad_edge=False, header_style=header_style)
    for place, title in enumerate(titles):
        justify: Any = "left" if place == 0 or title in texts else "right"
        table.add_column(
            title, justify=justify, no_wrap=place == 0 or not wraps, overflow="fold" if wraps else "ellipsis"
        )
    return table


def print_problems(console: Console, problems: Sequence[ConfigProblem]) -> None:
    """Print errors, then warnings; a block per problem, so that long values and messages stay readable."""
    errors = errors_only(problems)
    warnings = [problem for problem in problems if problem.severity == "warning"]
    for group, style in ((errors, "bold red"), (warnings, "bold yellow")):
        for problem in group:
            console.print(_block(problem, style))


def headline(problems: Sequence[ConfigProblem]) -> str:
    """Count the problems, e.g. `3 errors, 1 warning`."""
    errors = len(errors_only(problems))
    counts = ((errors, "error"), (len(problems) - errors, "warning"))
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts if count) or "no problems"


def _block(problem: ConfigProblem, style: str) -> Text:
    text = Text(f"{problem.severity}: ", style=style)
    text.append(problem.key, style="bold")
    if problem.value:
        text.append(f" = {problem.value}", style="not bold")
    text.append(f"\n    {problem.message}", style="not bold default")
    if problem.suggestion:
        text.append(f"\n    -> {problem.suggestion}", style="not bold cyan")
    if problem.where:
        text.append(f"\n    at {problem.where}", style="not bold dim")
    return text
