"""The command line of `tandem score`."""

from pathlib import Path
from typing import Annotated

import typer


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
    from launcher.score.command import score_command

    if (file is None) == (completion is None):
        raise typer.BadParameter("give either a FILE with completions, or --completion TEXT")
    one = {"completion": completion, **({"prompt": prompt} if prompt else {}), "answer": answer}
    raise typer.Exit(score_command(config, [one] if file is None else file, overrides or [], column, as_json=as_json))
