"""Prompts and answers: which files, and how they are read."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tandem_config.sections.base import PositiveInt, Section, about


class DataSection(Section):
    """Prompts and answers."""

    train: Path = Field(
        ...,
        description="JSONL or Parquet file of training rows.",
        json_schema_extra=about("no default: it depends on the task"),
    )
    heldout: Path | None = Field(
        None,
        description="JSONL or Parquet file for evaluation; null: no evaluation.",
        json_schema_extra=about("not every task has one"),
    )
    prompt_key: str = Field(
        "prompt", description="Column of the prompt (a string).", json_schema_extra=about("the usual name")
    )
    answer_key: str = Field(
        "answer", description="Column of the reference answer (a string).", json_schema_extra=about("the usual name")
    )
    shuffle: bool = Field(
        True,
        description="New order in each epoch, from run.seed; false: the file's order.",
        json_schema_extra=about("neighbours in a file are often alike, and would share a batch"),
    )
    max_prompt_tokens: PositiveInt = Field(
        1024,
        description="Longest prompt, in tokens.",
        json_schema_extra=about("longer than the questions of the usual mathematics sets", unit="tokens"),
    )
    overlong_prompts: Literal["error", "drop"] = Field(
        "error",
        description="What to do with a longer prompt: stop before the start, or leave it out and count it.",
        json_schema_extra=about("dropping data silently changes what is trained"),
    )
