"""The command line of `tandem logs`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Level(StrEnum):
    """Levels of log lines."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def logs(
    run_dir: Annotated[Path | None, typer.Argument(help="The run's folder; default: the newest one in ./runs.")] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(
            "--service", metavar="NAME", help="Only this service, e.g. rollout-0, or rollout; repeat for more."
        ),
    ] = None,
    level: Annotated[Level, typer.Option("--level", help="Lowest level.")] = Level.INFO,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only later lines: 90s, 10m, 2h, 1d ago, or 14:30.")
    ] = "",
    newest: Annotated[int | None, typer.Option("--newest", "-n", min=1, metavar="N", help="Only the newest N.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what is added too, until the run ends.")
    ] = False,
) -> None:
    """Print the logs of a run's services as readable lines, by time; tracebacks as such.

    \b
    Examples:
        tandem logs runs/arithmetic --level warning
        tandem logs --service rollout --since 10m --follow
    """
    from launcher.view.logs.command import logs_command

    raise typer.Exit(logs_command(run_dir, service or [], level=level.value, since=since, newest=newest, follow=follow))
