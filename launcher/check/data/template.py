"""Warns of a chat template that is not applied, and of what it does not write; says how it writes turns."""

import re
from collections.abc import Iterator, Sequence

from tandem_clients.formatting import PromptFormat, PromptText
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_files.chat.renderer import TemplateRenderer, probe
from tandem_files.chat.template import TemplateFailure
from tandem_files.rows.reading import Row

# Markers of turns: <|im_start|>, <|start_header_id|>, <start_of_turn>, [INST], <｜User｜>.
_MARK = re.compile(r"<[|｜][^<>{}'\"\s]+[|｜]>|<(?:start|end)_of_turn>|\[/?INST\]")


class PlainPrompts:
    """Counts prompts that hold none of the marks of the model's chat template."""

    def __init__(self, config: RunConfig, formats: PromptFormat) -> None:
        self._folder = config.model.tokenizer_path or config.model.path
        templates = "".join(template.text for template in formats.templates.values())
        self._marks = sorted(set(_MARK.findall(templates)))
        self._num_rows = 0
        self._num_plain = 0
        self._first = ""

    def add(self, batch: Sequence[tuple[Row, PromptText]]) -> None:
        """Look at rows that can be used."""
        self._num_rows += len(batch)
        for row, text in batch:
            if self._marks and not text.rendered and not any(mark in text.text for mark in self._marks):
                self._num_plain += 1
                self._first = self._first or f"{row.file}:{row.number}"

    def problems(self, key: str) -> Iterator[ConfigProblem]:
        """Warn if there were any. key: the part's key in the configuration."""
        if not self._num_plain:
            return
        named = ", ".join(self._marks[:3]) + (", ..." if len(self._marks) > 3 else "")
        yield problem(
            key,
            self._first,
            f"{self._folder} has a chat template, and prompts that are texts are used without it: "
            f"{self._num_plain} of {self._num_rows} hold none of its {named}, so a model that was tuned on it gets "
            "text that it has never seen",
            "set data.prompt_as: user_message to render each as a user's message; for a base model, set "
            "data.chat_template: none",
            severity="warning",
        )


def check_arguments(config: RunConfig, formats: PromptFormat) -> Iterator[ConfigProblem]:
    """Warn of arguments that no template looks at, and of a template that has looked at the clock."""
    unused = [set(template.unused) for template in formats.templates.values()]
    for name in sorted(set.intersection(*unused)) if unused else []:
        yield problem(
            "data.chat_template_kwargs",
            f"{name}: {config.data.chat_template_kwargs[name]}",
            "the chat template never looks at it",
            "is it spelt as in the template?",
            severity="warning",
        )
    for key in sorted(formats.lost_system):
        yield problem(
            key,
            getattr(config.data, key.removeprefix("data.")),
            "the chat template does not write system messages as they are: the policy does not see all of it",
            "put it into the user's message, or use another data.chat_template",
            severity="warning",
        )
    if formats.uses_clock:
        yield problem(
            "data.chat_template",
            config.data.chat_template,
            "the template writes the current date into prompts, so they change from day to day",
            "fix it, e.g. data.chat_template_kwargs: {date_string: 26 Jul 2024}",
            severity="warning",
        )


def check_turns(formats: PromptFormat) -> Iterator[ConfigProblem]:
    """Name a template that cannot continue the conversations of an environment."""
    try:
        formats.renderer()
    except ValueError as error:
        yield problem("data.chat_template", "", str(error))


def turn_lines(formats: PromptFormat, row: Row | None, history: str | None = None) -> list[str]:
    """Say before which messages a template writes what a conversation holds.

    Args:
        row: with tools; None: there is none.
        history: environment.history; None: there is no environment.
    """
    if row is None:
        return []
    try:
        renderer = TemplateRenderer(formats.template(row), formats.codec, formats.tools(row))
    except TemplateFailure as error:
        return [f"turns: none with this chat template: {error}"]
    found = probe(renderer)
    same = ", ".join(follow.kind for follow in found if follow.append_only)
    changed = [
        f"{follow.kind} ({follow.refused or f'{follow.held!r} becomes {follow.rendered!r}'})"
        for follow in found
        if not follow.append_only
    ]
    kept = f"turns: the chat template keeps a turn's ids before {same or 'nothing'} (tool calls: {renderer.parser})"
    lines = [kept, *([f"    it does not before {'; '.join(changed)}: docs/turns.md"] if changed else [])]
    if history and any(follow.kind.startswith("a question") and not follow.append_only for follow in found):
        does = {
            "template": "a branch begins there, which reads the template's text (not for spaces alone)",
            "keep": "it is kept all the same",
        }
        lines.append(f"    environment.history = {history}: {does[history]}")
    return lines
