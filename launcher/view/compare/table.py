"""`tandem compare`: prints a table per metric, one of times, the settings that differ, and the runs' troubles."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report import make_console, number_text, reporting, table_of
from launcher.view.compare.differences import REWARDS, differing
from launcher.view.compare.picture import draw
from launcher.view.compare.runs import RunCurves, begun, check_metrics, curve_of, read_runs
from launcher.view.metric_columns import COLUMNS
from servicekit.lifecycle.exit_codes import EXIT_OK
from tandem_files.metrics_table import ACCURACY, REWARD

# Iterations whose mean is shown.
LAST = 10
_TIMES = ("iteration_s", "generate_s", "train_s", "sync_s")
_TITLES = {column.metric: column.title for column in COLUMNS}
_LONGEST_SETTING = 24


@reporting()
def compare_command(
    folders: Sequence[Path], metrics: Sequence[str], *, smooth: float, out: Path | None, last: int
) -> int:
    """Run `tandem compare`.

    Args:
        metrics: empty: reward, and held-out accuracy if it was measured.
        smooth, last: as `draw` and `print_comparison` take them.
    Returns: the exit code.
    """
    console = make_console(ends_with_reader=True)
    runs, without_rows = begun(read_runs(folders))
    measured = [ACCURACY] if any(run.points(ACCURACY) for run in runs) else []
    chosen = list(dict.fromkeys(metrics)) or [REWARD, *measured]
    check_metrics(runs, metrics)
    if out is not None:
        draw(runs, chosen, smooth, out)
    print_comparison(console, runs, chosen, last)
    for run in without_rows:
        text = f"! {run.label}: left out, it has no finished iteration yet (state: {run.status})"
        console.print(Text(text, style="bold yellow"))
    if out is not None:
        console.print(Text(f"curves: {out}"))
    return EXIT_OK


def print_comparison(console: Console, runs: Sequence[RunCurves], metrics: Sequence[str], last: int = LAST) -> None:
    """Print the tables.

    Args:
        last: number of newest values in the means.
    """
    for metric in metrics:
        table = table_of(metric, "first", "final", "best", "at", f"mean of last {last}", wraps=True)
        for run in runs:
            curve = curve_of(run, metric, last)
            if curve is None:
                table.add_row(run.label, *["-"] * 5)
                continue
            first, final, best, mean = (f"{value:.4g}" for value in (curve.first, curve.final, curve.best, curve.mean))
            table.add_row(run.label, first, final, best, str(curve.best_at), mean)
        console.print(table)
        console.print()
    console.print(_times(runs))
    different = differing(runs)
    console.print()
    if different:
        table = table_of("settings that differ", *(run.label for run in runs), wraps=True)
        for key, texts in different.items():
            table.add_row(key, *(texts if key == REWARDS else _shortened(texts)))
        console.print(table)
    else:
        console.print(Text("the settings of the runs do not differ"))
    for run in runs:
        for trouble in run.troubles:
            console.print(Text(f"! {run.label}: {trouble}", style="bold yellow"))


def _times(runs: Sequence[RunCurves]) -> Table:
    titles = (_TITLES[metric] for metric in _TIMES)
    table = table_of("median times", "done", "state", *titles, "tokens/s", wraps=True)
    for run in runs:
        done = f"{run.rows[-1]['iteration']}/{run.total}"
        seconds = [number_text(run.median_of(metric), ".3g") for metric in _TIMES]
        table.add_row(run.label, done, run.status, *seconds, number_text(run.median_of("tokens_per_s"), ".0f"))
    return table


def _shortened(texts: Sequence[str]) -> Sequence[str]:
    """Shorten values, unless they would look the same."""
    # At their fronts: the ends of paths differ.
    short = [text if len(text) <= _LONGEST_SETTING else "..." + text[3 - _LONGEST_SETTING :] for text in texts]
    return short if len(set(short)) == len(set(texts)) else texts
