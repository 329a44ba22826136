"""Prompts and answers: which files, and how they are read."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from tandem_config.sections.base import PositiveFloat, PositiveInt, Section, setting

# Given to a template by the renderer itself, or without a meaning there.
RESERVED_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize"})


class DataSource(Section):
    """A file, or the files that a glob matches, with what is particular to them."""

    path: Path = Field(
        description="File or glob of files: JSON lines (.jsonl, .ndjson), a JSON list (.json) or Parquet (.parquet)."
    )
    weight: PositiveFloat | None = Field(
        None,
        description="Rate at which its rows are drawn, relative to the other sources; all sources have one or none.",
    )
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] | None = Field(
        None, description="Name in messages and next to samples; null: the file's."
    )
    prompt_key: str | None = Field(None, description="In place of data.prompt_key.")
    answer_key: str | None = Field(None, description="In place of data.answer_key.")
    system_key: str | None = Field(None, description="In place of data.system_key; '': its rows have none.")


def _as_sources(value: Any) -> Any:
    """Read the short forms: a path is a source, and a single source is a list of one."""
    if value is None:
        return None
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not entries:
        raise PydanticCustomError("no_source", "must name at least one file")
    return tuple(_as_source(entry) for entry in entries)


def _as_source(entry: Any) -> Any:
    if isinstance(entry, (str, Path)) and str(entry).strip():
        return {"path": Path(entry)}
    if isinstance(entry, Mapping):
        path = entry.get("path")
        return {**entry, "path": Path(path)} if isinstance(path, str) and path.strip() else entry
    if isinstance(entry, DataSource):
        return entry
    raise PydanticCustomError("path_type", "must be a path")


def _consistent(sources: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        raise PydanticCustomError("weights", "has weights for some sources only: give one to each, or to none")
    for what, values in (("name", [s.name for s in sources]), ("path", [s.path for s in sources])):
        twice = next((value for value, count in Counter(values).items() if value is not None and count > 1), None)
        if twice is not None:
            raise PydanticCustomError(
                "twice", "has two sources of the {what} {value}", {"what": what, "value": str(twice)}
            )
    return sources


Sources = Annotated[tuple[DataSource, ...], BeforeValidator(_as_sources), AfterValidator(_consistent)]


def _not_reserved(arguments: dict[str, Any]) -> dict[str, Any]:
    reserved = sorted(RESERVED_TEMPLATE_ARGUMENTS & set(arguments))
    if reserved:
        raise PydanticCustomError("reserved", "may not hold {name}, which Tandem sets itself", {"name": reserved[0]})
    return arguments


class DataSection(Section):
    """Prompts and answers; docs/data.md shows each form."""

    train: Sources = setting(..., "no default: it depends on the task")
    """Training rows: a file, a glob, a list of these, or a mixture: a list of `{path, weight, name, prompt_key,
    answer_key, system_key}`, whose rows are drawn at rates relative to the weights."""
    heldout: Sources | None = setting(None, "not every task has one")
    """Rows for evaluation, in the same forms, without weights; null: no evaluation."""
    prompt_key: str = setting("prompt", "the usual name")
    """Column of the prompt: a string, or a list of messages `{role, content}` or `{from, value}`, also as JSON text.
    Dots lead into columns."""
    answer_key: str | None = setting("answer", "the usual name")
    """Column of the reference answer: a string or a number. Dots lead into columns (`reward_model.ground_truth`); null:
    rows have none."""
    prompt_as: Literal["text", "user_message"] = setting(
        "text", "a base model has no template; `tandem check` warns where a model has one"
    )
    """How a prompt that is a string is used: as it is, or as a user's message in the chat template."""
    chat_template: str = setting("auto", "the one that the model was tuned with")
    """auto: messages are rendered with the tokenizer's chat template; none: there are only texts; or a path to a .jinja
    file, the name of one of the tokenizer's templates, or a template's text."""
    system_prompt: str | None = setting(None, "the template's own default, if it has one")
    """System message put before messages that do not begin with one."""
    system_key: str | None = setting(None, "few data have one for each row")
    """Column of a row's own system prompt, put before its messages; where it is null or empty, data.system_prompt
    is."""
    tools_key: str | None = setting(None, "few data have tools")
    """Column of the tools' JSON schemas (a list, or a list as JSON text), given to the chat template."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_not_reserved)] = setting(
        factory=dict, why="the template's own defaults"
    )
    """Further arguments of the chat template, e.g. `{enable_thinking: false}`."""
    shuffle: bool = setting(True, "neighbours in a file are often alike, and would share a batch")
    """New order in each epoch of a source, from run.seed; false: the files' order."""
    max_prompt_tokens: PositiveInt = setting(1024, "longer than the questions of the usual mathematics sets", "tokens")
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["error", "drop"] = setting("error", "dropping data silently changes what is trained")
    """What to do with a longer prompt: stop before the start, or leave it out and count it."""
