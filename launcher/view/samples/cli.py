"""The command line of `tandem samples`."""

from pathlib import Path
from typing import Annotated

import typer


def samples(
    run_dir: Annotated[Path | None, typer.Argument(help="The run's folder; default: the newest one in ./runs.")] = None,
    iteration: Annotated[
        str, typer.Option("--iteration", "-i", metavar="N|last", help="Iteration; 0: before the first one.")
    ] = "last",
    kind: Annotated[str | None, typer.Option("--kind", "-k", help="train, heldout, or another evaluation set.")] = None,
    group: Annotated[
        str | None, typer.Option("--group", help="All samples of a group: its id, or a part of it (g3, row77).")
    ] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="REGEX", help="Samples with this text in prompt or completion.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Samples that a reward could not score, with why.")] = False,
    worst: Annotated[int, typer.Option("--worst", min=0, metavar="K", help="The K of least reward.")] = 0,
    best: Annotated[int, typer.Option("--best", min=0, metavar="K", help="The K of greatest reward.")] = 0,
    longest: Annotated[int, typer.Option("--longest", min=0, metavar="K", help="The K of most tokens.")] = 0,
    shortest: Annotated[int, typer.Option("--shortest", min=0, metavar="K", help="The K of fewest tokens.")] = 0,
    full: Annotated[
        bool, typer.Option("--full", help="Whole texts; else the middle of long ones is left out.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object per sample and line, with everything.")
    ] = False,
) -> None:
    """Show samples of a run: prompt, completion, reward by part, advantage, length, versions.

    Without options: the two best and the two worst of the last iteration. While the run is running too.

    \b
    Examples:
        tandem samples
        tandem samples runs/arithmetic --iteration 40 --worst 5
        tandem samples runs/arithmetic --kind heldout --grep 'I cannot'
        tandem samples runs/arithmetic --group g3 --json
    """
    if iteration != "last" and not iteration.isdecimal():
        raise typer.BadParameter(f"--iteration {iteration}: give a number, or last")
    from launcher.view.samples.choose import SampleQuery
    from launcher.view.samples.command import samples_command

    ends = [("best", best), ("worst", worst), ("longest", longest), ("shortest", shortest)]
    wanted = SampleQuery(
        iteration=None if iteration == "last" else int(iteration),
        kind=kind,
        group=group,
        pattern=grep,
        failed=failed,
        ends=[(name, count) for name, count in ends if count],
    )
    raise typer.Exit(samples_command(run_dir, wanted, full=full, as_json=as_json))
