"""The command line of `tandem compare`."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="The runs' folders.", metavar="RUN_DIR...")],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="Figure of metrics.jsonl; repeat for more. Default: the reward."),
    ] = None,
    smooth: Annotated[
        float, typer.Option("--smooth", min=0.0, max=0.999, help="Smoothing in the picture: weight of the past.")
    ] = 0.6,
    last: Annotated[int, typer.Option("--last", min=1, metavar="N", help="Mean over the newest N values.")] = 10,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also draw the curves: picture.png, .svg or .pdf.")
    ] = None,
) -> None:
    """Compare runs: first, final, best and mean figures, times, settings that differ; optionally a picture.

    \b
    Examples:
        tandem compare runs/a runs/b --out curves.png
        tandem compare runs/* --metric reward_mean --metric entropy
    """
    from launcher.view.compare.command import compare_command

    raise typer.Exit(compare_command(run_dirs, metric or [], smooth=smooth, out=out, last=last))
