"""From a row to the text that is tokenized: as it is, or rendered with a chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_config.paths import is_jinja_file
from tandem_config.schema import DataSection
from tandem_files.chat.folder import DEFAULT, read_special_tokens, read_templates
from tandem_files.chat.renderer import TemplateRenderer
from tandem_files.chat.template import ChatTemplate, TemplateFailure
from tandem_files.digests import text_digest
from tandem_files.rows.messages import Message
from tandem_files.rows.reading import Row
from tandem_files.rows.values import BadRow
from tandem_files.tokenizer import TextCodec

_WITH_TOOLS = "tool_use"
# The setting under which PromptFormat.identity has an environment's tools.
TOOLS_SETTING = "environment.tools"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptText:
    """The text of a prompt."""

    text: str
    # Written by a chat template, so with all special tokens.
    rendered: bool
    # What the template got; None: there was none.
    messages: list[Message] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTools:
    """What an environment changes in prompts. schemas: of the tools that it has (JSON schemas); None: it has none."""

    schemas: Sequence[Mapping[str, Any]] | None = None


class PromptFormat:
    """Renders and tokenizes rows as a configuration says.

    Args:
        templates: by name; those that are used. {}: there is none.
        without: why there is no template, for rows that need one.
        episodes: None: there is no environment.
    Raises: ValueError: a template is not valid.
    """

    def __init__(
        self,
        section: DataSection,
        codec: TextCodec,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        without: str,
        episodes: EpisodeTools | None = None,
    ) -> None:
        self._episodes = episodes
        self._is_tokenizers = section.chat_template in ("auto", "none")
        self._as_message = section.prompt_as == "user_message"
        self._system_prompt = section.system_prompt
        self.codec = codec
        self._without = without
        self._special_tokens = special_tokens
        self._arguments = section.chat_template_kwargs
        # Settings of system prompts that the template has not written.
        self.lost_system: set[str] = set()
        try:
            self.templates = {
                name: ChatTemplate(text, special_tokens, section.chat_template_kwargs)
                for name, text in templates.items()
            }
        except TemplateFailure as error:
            raise ValueError(f"data.chat_template: the template {error}") from error

    def text(self, row: Row) -> PromptText:
        """Return the text of a row's prompt. Raises: BadRow: it cannot be rendered."""
        setting = "data.system_prompt" if row.system is None else "data.system_key"
        system = self._system_prompt if row.system is None else row.system
        if isinstance(row.prompt, str) and not self._as_message:
            if self._episodes is not None:
                raise BadRow("is a text, and an environment answers messages: set data.prompt_as: user_message")
            if system is not None:
                raise BadRow(f"is a text, which {setting} cannot be put before: set data.prompt_as: user_message")
            return PromptText(text=row.prompt, rendered=False)
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        messages = self._with_system(messages, system, row)
        text = self._render(messages, row)
        if system is not None and messages[0].get("content") == system and system.strip() not in text:
            self.lost_system.add(setting)
        return PromptText(text=text, rendered=True, messages=messages)

    def encode(self, texts: Sequence[PromptText]) -> list[list[int]]:
        """Tokenize texts; those that a template has not written get the tokenizer's special tokens, once."""
        rendered = iter(self.codec.encode_rendered([text.text for text in texts if text.rendered]))
        plain = iter(self.codec.encode([text.text for text in texts if not text.rendered]))
        return [next(rendered if text.rendered else plain) for text in texts]

    def identity(self) -> dict[str, str]:
        """Return what rendered prompts depend on besides their rows, by setting: texts, or digests of long ones."""
        texts = {name: template.text for name, template in self.templates.items()}
        tools = {} if self._episodes is None else {TOOLS_SETTING: json.dumps(self._episodes.schemas)}
        return tools | {
            "data.chat_template": text_digest(json.dumps([texts, dict(self._special_tokens)], sort_keys=True)),
            "data.system_prompt": "null" if self._system_prompt is None else json.dumps(self._system_prompt),
            "data.chat_template_kwargs": json.dumps(self._arguments, sort_keys=True, default=str),
        }

    @property
    def own_template(self) -> str | None:
        """The template that data.chat_template names in place of the tokenizer's default; None: it names none."""
        return None if self._is_tokenizers else self.templates[DEFAULT].text

    def renderer(self) -> TemplateRenderer:
        """Return what renders whole conversations with the environment's tools. Raises: ValueError: it cannot."""
        tools = None if self._episodes is None else self._episodes.schemas
        template = self.templates.get(_WITH_TOOLS if tools and _WITH_TOOLS in self.templates else DEFAULT)
        if template is None:
            raise ValueError("an environment needs a chat template: set data.chat_template to a .jinja file")
        if tools and not template.takes_tools:
            raise ValueError("environment.tools: the chat template does not write tools: set data.chat_template")
        try:
            return TemplateRenderer(template, self.codec, tools)
        except TemplateFailure as error:
            raise ValueError(f"environment: the chat template cannot continue conversations: {error}") from error

    def tokenizer_digest(self) -> str:
        """Return the digest of the tokenizer."""
        return self.codec.digest()

    @property
    def uses_clock(self) -> bool:
        """Whether a template has written the time, so that prompts differ from day to day."""
        return any(template.uses_clock for template in self.templates.values())

    def _with_system(self, messages: list[Message], system: str | None, row: Row) -> list[Message]:
        """Put a system message before messages; those that begin with one keep it, if the row names no other."""
        if system is None:
            return messages
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": system}, *messages]
        if row.system is not None and messages[0].get("content") != row.system:
            raise BadRow("has a system prompt (data.system_key), and its messages begin with another: leave one out")
        return messages

    def tools(self, row: Row) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools that a row's messages are rendered with. Raises: BadRow: row and environment have some."""
        if self._episodes is None or self._episodes.schemas is None:
            return row.tools
        if row.tools is not None:
            raise BadRow("has tools, and so has the environment: set data.tools_key: null")
        return self._episodes.schemas

    def template(self, row: Row) -> ChatTemplate:
        """Return the template that a row's messages are rendered with. Raises: BadRow: there is none."""
        tools = self.tools(row)
        name = _WITH_TOOLS if tools is not None and _WITH_TOOLS in self.templates else DEFAULT
        template = self.templates.get(name)
        if template is None:
            raise BadRow(f"holds messages, which need a chat template: {self._without}")
        if tools is not None and not template.takes_tools:
            raise BadRow("has tools, and the chat template does not write them: set data.tools_key: null")
        return template

    def _render(self, messages: list[Message], row: Row) -> str:
        template = self.template(row)
        try:
            return template.render(messages, self.tools(row))
        except TemplateFailure as error:
            raise BadRow(f"the chat template fails on its messages: {error}") from error


def prompt_format(section: DataSection, codec: TextCodec, episodes: EpisodeTools | None = None) -> PromptFormat:
    """Find the chat template that a configuration names. Raises: OSError; ValueError: it cannot be used."""
    folder = codec.folder
    special_tokens = {} if folder is None else read_special_tokens(folder)
    templates, without = _templates(section.chat_template, folder)
    return PromptFormat(section, codec, templates, special_tokens, without, episodes)


def _templates(choice: str, folder: Path | None) -> tuple[dict[str, str], str]:
    """Return the templates to use, by name, and if there are none, why."""
    if choice == "none":
        return {}, "set data.chat_template: auto (it is none)"
    if is_jinja_file(choice):
        return {DEFAULT: _read(Path(choice))}, ""
    if "{{" in choice or "{%" in choice:
        return {DEFAULT: choice}, ""
    own = {} if folder is None else read_templates(folder)
    if choice == "auto":
        if own and DEFAULT not in own:
            raise ValueError(
                f"data.chat_template = auto: {folder} has several templates and none of the name {DEFAULT!r}: name one "
                f"of {', '.join(sorted(own))}"
            )
        used = {name: text for name, text in own.items() if name in (DEFAULT, _WITH_TOOLS)}
        return used, f"{folder} has none; set data.chat_template to a .jinja file, or use a text as prompt"
    if choice in own:
        return {DEFAULT: own[choice]}, ""
    known = ", ".join(["auto", "none", *sorted(own)])
    raise ValueError(
        f"data.chat_template = {choice}: is neither a path that ends in .jinja, nor the text of a template, nor one of "
        f"{known}"
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"data.chat_template = {file}: cannot be read: {why}") from error
