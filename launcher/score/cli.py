"""The command line of `tandem score`. Imports when it is called."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from launcher.score.scoring import Report


def score(
    config: Annotated[Path, typer.Option("--config", "-c", help="The configuration file, as of `tandem run`.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="JSONL or Parquet: completions, the data's columns.", show_default=False),
    ] = None,
    completion: Annotated[str | None, typer.Option("--completion", metavar="TEXT", help="One completion.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Its prompt.")] = "",
    answer: Annotated[str, typer.Option("--answer", metavar="TEXT", help="Its reference answer.")] = "",
    column: Annotated[
        str, typer.Option("--column", metavar="NAME", help="Column of FILE with the completion, or a list of them.")
    ] = "completion",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with everything.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="Override one key; repeat for more."),
    ] = None,
) -> None:
    """Score completions of one's own with the rewards of a configuration, before a run.

    Each reward's score, the weighted sum, why a score is 0 or failed, and the time, with the run's own workers and
    limits. Nothing else is started, and no weights are needed. A stored file of samples can be scored again.

    \b
    Examples:
        tandem score -c my.yaml completions.jsonl
        tandem score -c my.yaml --prompt '7*8?' --completion 'It is 56.' --answer 56
        tandem score -c my.yaml completions.jsonl --json --set reward.kind=math_verify
    """
    if (file is None) == (completion is None):
        raise typer.BadParameter("give either a FILE with completions, or --completion TEXT")
    from launcher.report import reporting
    from tandem_files.rows.problems import DataError

    one = {"completion": completion, **({"prompt": prompt} if prompt else {}), "answer": answer}
    command = reporting(usage=(DataError, OSError))(_score)
    raise typer.Exit(command(config, [one] if file is None else file, overrides or [], column, as_json=as_json))


def _score(
    config: Path,
    completions: Path | Sequence[Mapping[str, Any]],
    overrides: Sequence[str],
    column: str,
    *,
    as_json: bool,
) -> int:
    """Run `tandem score`. Returns: the exit code; EXIT_FAILED if a run would end."""
    from launcher.report import make_console
    from launcher.score.scoring import score as score_rows
    from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK
    from servicekit.logs import configure_logging

    # What own functions print goes to stderr, as a run's goes to the coordinator's log.
    configure_logging("score", level="WARNING" if as_json else "INFO")
    report = score_rows(config, completions, overrides=overrides, column=column)
    console = make_console()
    if as_json:
        console.file.write(json.dumps(report.plain()) + "\n")
    else:
        for line in _lines(report):
            console.print(line)
    return EXIT_FAILED if report.would_end else EXIT_OK


def _lines(report: "Report") -> Iterator["Text"]:
    from rich.text import Text

    from launcher.report import number_text
    from launcher.score.scoring import shown
    from launcher.view.metric_columns import factor
    from launcher.view.samples.draw import turns, visible

    for one in report.completions:
        reward = "left out" if one.reward is None else f"reward {one.reward:.4g}"
        scores = [
            f"{name} {number_text(score, '.4g')}{factor(name, report.weights)}" for name, score in one.scores.items()
        ]
        seconds = f"{sum(one.seconds.values()):.3f} s" if one.seconds else ""
        yield Text.assemble((one.place, "bold cyan"), "  ".join(["", reward, *scores, *_texts(one.parts), seconds]))
        yield Text(f"    {visible(shown(one.completion))}", style="dim")
        if one.transcript:
            yield Text(indent(turns(one.transcript, full=False), " " * 6))
        for name, why in one.why.items():
            yield Text(f"    {name}: {visible(why)}")
    totals = report.totals
    yield Text("")
    left_out = f", {totals['left_out']} left out" if totals["left_out"] else ""
    means = _texts({name: mean for name, mean in totals["means"].items() if mean is not None})
    mean = number_text(totals["reward_mean"], ".4g")
    yield Text("  ".join([f"{totals['completions']} completions{left_out}: mean reward {mean}", *means]), style="bold")
    for remark in report.remarks:
        yield Text(f"note: {remark}", style="yellow")
    if report.would_end:
        yield Text(f"a run would end here: {report.would_end}", style="bold red")


def _texts(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items()]
