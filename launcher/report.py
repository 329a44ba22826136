"""Prints configuration problems: key, value, what is wrong and what to do about it."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tandem_config.problems import ConfigProblem, errors_only


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
