"""The command line of `tandem init`."""

from pathlib import Path
from typing import Annotated

import typer

_ROWS = "Rows: JSONL or Parquet, a file or a glob in quotes; repeat for more."


def init(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Hugging Face model folder.")],
    data: Annotated[list[str], typer.Option("--data", metavar="FILE", help=f"Training rows. {_ROWS}")],
    heldout: Annotated[
        list[str] | None, typer.Option("--heldout", metavar="FILE", help="Rows for evaluation, in the same forms.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            metavar="FILE.py:FUNCTION",
            help="Your own reward; default: a built-in one that fits the answers.",
        ),
    ] = None,
    prompt_key: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the prompt.")] = None,
    answer_key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the answer; null: rows have none.")
    ] = None,
    system_key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of each row's own system prompt.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write; default: named after the data.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="A setting of your own; repeat for more."),
    ] = None,
) -> None:
    """Write a commented configuration for a model and data, and check it; start nothing.

    Columns, reward, lengths and sizes are suggested from the model, the rows and this machine's GPUs, each with its
    reason. What is given here is kept as it is.

    \b
    Examples:
        tandem init --model /models/Qwen2.5-0.5B-Instruct --data train.jsonl
        tandem init --model my-model --data train.jsonl --heldout test.jsonl --reward my_rewards.py:score --out my.yaml
        tandem init --model my-model --data "math/*.parquet" --prompt-key problem --set grpo.group_size=32
    """
    from launcher.init.command import InitRequest, init_command
    from launcher.init.layout import this_machine

    asked = InitRequest(
        model=model,
        data=data,
        heldout=heldout or [],
        reward=reward,
        prompt_key=prompt_key,
        answer_key=answer_key,
        system_key=system_key,
        out=out,
        force=force,
        overrides=overrides or [],
    )
    raise typer.Exit(init_command(asked, this_machine()))
