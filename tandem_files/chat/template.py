"""Renders messages with a chat template, text for text as transformers' `apply_chat_template` does.

The environment is that of transformers (utils/chat_template_utils.py): sandboxed, as a template comes with a model.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Asks whether a message has no content: DeepSeek's templates write tool calls only then.
_ASKS_FOR_CONTENT = re.compile(r"content['\"]?\]?\s*(?:is(?:\s+not)?|==|!=)\s+[Nn]one\b")


class TemplateFailure(ValueError):
    """A template cannot be read, or refuses messages; the message says why."""


class ChatTemplate:
    """A compiled chat template with the tokenizer's special tokens.

    Args:
        text: the template. Raises: TemplateFailure: it is not valid.
        special_tokens: `bos_token` and others, which the template may name.
        arguments: further values that the template may name.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
        self.text = text
        # Whether it has asked for the current time, so that prompts differ from day to day.
        self.uses_clock = False
        environment = _environment(self._now)
        try:
            self._template = environment.from_string(text)
            self._names = meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailure(f"is not a valid template: line {error.lineno}: {error.message}") from error
        self._values = {**special_tokens, **arguments}
        # Null fields of messages are left out: Parquet has them everywhere, and templates write them as "None".
        self._fillings: Mapping[str, Any] = {"content": None} if _ASKS_FOR_CONTENT.search(text) else {}
        # Arguments that the template never looks at.
        self.unused = tuple(sorted(set(arguments) - self._names))

    @property
    def takes_tools(self) -> bool:
        """Whether the template looks at tools."""
        return "tools" in self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages, followed by the beginning of the assistant's answer if asked for.

        Raises: TemplateFailure: the template refuses them, or fails.
        """
        if self._fillings:
            messages = [{**self._fillings, **message} for message in messages]
        try:
            return self._template.render(messages=messages, tools=tools, documents=None,
                                         add_generation_prompt=add_generation_prompt, **self._values)  # fmt: skip
        except Exception as error:
            raise TemplateFailure(str(error) or type(error).__name__) from error

    def _now(self, pattern: str) -> str:
        self.uses_clock = True
        return datetime.now().strftime(pattern)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for losses over whole chats; here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - as in the class it extends

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block to its body, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment(now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escaping HTML, as templates of chat models expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
