"""Implements `tandem compare`."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from launcher.view.compare.picture import draw
from launcher.view.compare.runs import begun, check_metrics, read_runs
from launcher.view.compare.table import print_comparison
from launcher.view.run_view import make_console
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_OK


def compare_command(
    folders: Sequence[Path], metrics: Sequence[str], *, smooth: float, out: Path | None, last: int
) -> int:
    """Run `tandem compare`.

    Args:
        metrics: empty: reward, and held-out accuracy if it was measured.
        smooth, last: as `picture.draw` and `table.print_comparison` take them.
    Returns: the exit code.
    """
    console = make_console(ends_with_reader=True)
    try:
        runs, without_rows = begun(read_runs(folders))
        measured = [metric for metric in ("heldout_accuracy",) if any(run.points(metric) for run in runs)]
        chosen = list(dict.fromkeys(metrics)) or ["reward_mean", *measured]
        check_metrics(runs, metrics)
        if out is not None:
            draw(runs, chosen, smooth, out)
        print_comparison(console, runs, chosen, last)
        for run in without_rows:
            text = f"! {run.label}: left out, it has no finished iteration yet (state: {run.status})"
            console.print(Text(text, style="bold yellow"))
        if out is not None:
            console.print(Text(f"curves: {out}"))
    except ConfigError as error:
        make_console(stderr=True).print(Text(str(error), style="bold red"))
        return EXIT_BAD_CONFIG
    return EXIT_OK
