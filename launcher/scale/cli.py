"""The options of `tandem scale`. Heavy imports happen inside, so that --help stays quick."""

from pathlib import Path
from typing import Annotated

import typer


def scale(
    run_dir: Annotated[Path, typer.Argument(help="The run's folder; the run may be running or stopped.")],
    size: Annotated[str, typer.Argument(metavar="rollout=N", help="How many replicas it is to have.")],
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Do not wait until exactly so many replicas serve.")
    ] = False,
) -> None:
    """Give a run of `tandem run` more or fewer replicas while it trains; no group and no token is lost.

    New replicas get the current weights, then work. Those with the highest numbers go first: what they sample continues
    on the others. The number is kept over restarts and --resume. Waits for run.startup_timeout_s at most.

    Exit codes: 0 exactly so many serve, or noted for the resume of a run that is stopped; 1 they do not; 2 refused.

    \b
    Examples:
        tandem scale runs/my-run rollout=4
        tandem scale runs/my-run rollout=1 --no-wait
    """
    from launcher.scale.command import scale_command

    raise typer.Exit(scale_command(run_dir, size, wait=not no_wait))
