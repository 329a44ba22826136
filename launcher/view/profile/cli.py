"""The command line of `tandem profile`."""

from pathlib import Path
from typing import Annotated

import typer


def profile(
    run_dir: Annotated[Path | None, typer.Argument(help="The run's folder; default: the newest one in ./runs.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Train step; default: the last one that was profiled.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Rank whose operators are listed; default: the busiest.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=0, metavar="K", help="Operators that are listed.")] = 12,
) -> None:
    """Show where the time of a profiled train step went: computing, communication, neither, parts, operators.

    `profile.steps` in the configuration says which steps a run profiles. Their traces open in Perfetto
    and chrome://tracing.

    \b
    Examples:
        tandem run -c my.yaml --set profile.steps=1
        tandem profile
        tandem profile runs/arithmetic --step 2 --rank 1 --top 30
    """
    from launcher.view.profile.command import profile_command

    raise typer.Exit(profile_command(run_dir, step=step, rank=rank, top=top))
