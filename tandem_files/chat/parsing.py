"""Reads an assistant's turn from the text that was sampled: thinking, content, tool calls, and what is malformed.

A call that cannot be read stays in the content as it was written, and an error names it: nothing is dropped or raised.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

Tools = Sequence[Mapping[str, Any]]
_OPEN, _CLOSE = "<think>", "</think>"
_CALLED, _CALLED_END = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
# Where a bare call may begin: behind a marker, with a line, behind another. One begins with such a key.
_BARE = re.compile(r"(<\|python_tag\|>|\[TOOL_CALLS\])|^(?=[ \t]*[{\[])|(?<=[;}])(?=\s*\{)", re.MULTILINE)
_BARE_ATTEMPT = re.compile(r'\s*\[?\s*\{\s*"(?:name|arguments|parameters|type)"\s*:')
_SPACE, _BETWEEN_CALLS = re.compile(r"\s*"), re.compile(r"[\s;]*")
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_HARMONY_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
# What is wrong with a call that cannot be read; LookupError: JSON without the keys of a call.
_MALFORMED = (ValueError, LookupError, RecursionError)
# Characters of a malformed call that its error shows.
_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool, as a policy wrote it.

    Attributes:
        arguments: a JSON object.
        raw: the text of the arguments, as it was sampled.
        id: unique in its turn; nine letters and digits, as Mistral's templates want. A caller may replace it.
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """What a policy wrote in one turn.

    Attributes:
        content: the text without thinking, calls and the end of the turn; malformed calls are in it.
        reasoning: the text of the thinking block; None: there is none.
        raw: the text of all sampled ids, with special tokens.
        truncated: whether no token that ends a turn was sampled.
        errors: a line for each malformed call.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    raw: str = ""
    truncated: bool = False
    errors: tuple[str, ...] = ()

    def message(self, thought_key: str | None = "reasoning_content") -> dict[str, Any]:
        """Return the message that a chat template takes; arguments are objects, as some templates iterate over them."""
        message: dict[str, Any] = {"role": "assistant"}
        if self.content or not self.tool_calls:  # some templates write calls only where there is no content
            message["content"] = self.content
        if self.reasoning is not None and thought_key is not None:
            message[thought_key] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(slots=True)
class _Found:
    """What a parser has found in a text."""

    content: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, name: str, arguments: Any, raw: str) -> None:
        """Add a call. Raises: ValueError: it is malformed."""
        if isinstance(arguments, str):  # JSON of an object, as in the API that most agents speak
            arguments = _DECODER.decode(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("its name must be a text and its arguments a JSON object")
        # Half a surrogate pair can be written in JSON, and cannot be sent to a tool.
        json.dumps([name, arguments], ensure_ascii=False).encode()
        self.calls.append(ToolCall(name=name, arguments=arguments, raw=raw, id=f"call{len(self.calls):05}"))

    def malformed(self, text: str, error: Exception) -> None:
        """Keep a call that cannot be read as content, and name it."""
        number = len(self.calls) + len(self.errors) + 1
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        self.errors.append(f"tool call {number} is malformed: {error}: {shown!r}")
        self.content.append(text)


def parse_turn(parser: str, text: str, *, tools: Tools | None = None, opened: bool = False) -> ParsedTurn:
    """Parse the text of a turn, without the token that ends it.

    Args:
        parser: one of PARSERS.
        tools: JSON schemas, which say whether a value without quotes is a string.
        opened: whether the prompt has opened the thinking block.
    """
    found = _Found()
    rest = text if parser == "harmony" else _thinking(text, found, opened=opened)
    PARSERS[parser](rest, found, tools or ())
    # Beside calls, templates write content without the whitespace around it.
    pieces = [piece.strip() for piece in found.content] if found.calls else found.content
    return ParsedTurn(
        content=("\n" if found.calls else "").join(piece for piece in pieces if piece),
        reasoning="\n".join(found.thoughts) if found.thoughts else None,
        tool_calls=tuple(found.calls),
        errors=tuple(found.errors),
    )


def parser_for(template_text: str) -> str:
    """Return the name of the parser of the calls that a chat template writes, by marks in its text.

    >>> parser_for("<|im_start|>assistant <tool_call>"), parser_for("User: {{ messages[0].content }}")
    ('hermes', 'none')
    """
    return next((name for mark, name in _MARKS if re.search(mark, template_text)), "none")


def _thinking(text: str, found: _Found, *, opened: bool) -> str:
    """Take the thinking block off a text. One that is not closed holds all of it. Returns: the rest."""
    begun = text.lstrip()
    if begun.startswith(_OPEN):
        text = begun.removeprefix(_OPEN)
    elif not opened:
        return text
    thought, _, rest = text.partition(_CLOSE)
    found.thoughts.append(thought.strip("\n"))
    return rest.lstrip("\n")


def _plain(text: str, found: _Found, tools: Tools) -> None:
    found.content.append(text)


def _hermes(text: str, found: _Found, tools: Tools) -> None:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    _tagged(text, found, lambda at, stop: _json_call(text, at, found, end=_CALLED_END))


def _glm(text: str, found: _Found, tools: Tools) -> None:
    """Read `<tool_call>name`, pairs of `<arg_key>` and `<arg_value>`, and `</tool_call>`."""

    def read(at: int, stop: int) -> int:
        name, arguments = _GLM_NAME.match(text, at, stop), dict[str, Any]()
        if name is None:
            raise ValueError("it has no name")
        end, strings = name.end(), _string_arguments(name[1], tools)
        while (pair := _GLM_PAIR.match(text, end, stop)) is not None:
            key, value = pair[1].strip(), pair[2]
            arguments[key], end = value if key in strings else _json_or_text(value), pair.end()
        closed = _expect(text, end, _CALLED_END)
        found.add(name[1], arguments, text[name.end() : end].rstrip())
        return closed

    _tagged(text, found, read)


def _tagged(text: str, found: _Found, read: Callable[[int, int], int]) -> None:
    """Read calls between tags.

    Args:
        read: adds the call between two places. Returns: where its closing tag ends. Raises: an error of _MALFORMED.
    """
    at = 0
    while (begin := text.find(_CALLED, at)) >= 0:
        found.content.append(text[at:begin])
        inside = begin + len(_CALLED)
        stop = _end_of_malformed(text, inside)
        try:
            at = read(inside, stop)
        except _MALFORMED as error:
            found.malformed(text[begin:stop], error)
            at = stop
    found.content.append(text[at:])


def _end_of_malformed(text: str, at: int) -> int:
    """Return how far a malformed call reaches: to its closing tag, the next call, or the end of the text."""
    following = text.find(_CALLED, at)
    stop = following if following >= 0 else len(text)
    close = text.find(_CALLED_END, at, stop)
    return close + len(_CALLED_END) if close >= 0 else stop


def _bare(text: str, found: _Found, tools: Tools) -> None:
    """Read JSON objects with a name and arguments, or lists of them, that begin a line or follow a marker or a call."""
    at = end = 0
    for mark in _BARE.finditer(text):
        is_attempt = mark[1] is not None or _BARE_ATTEMPT.match(text, mark.end()) is not None
        if mark.start() < end or not is_attempt:  # within a call, or an answer with braces
            continue
        read = _Found()
        try:
            end = _json_calls(text, mark.end(), read)
        except _MALFORMED as error:
            if mark[1] is None and isinstance(error, LookupError):  # an answer in JSON
                continue
            found.content.append(text[at : mark.start()])
            found.malformed(text[mark.start() :], error)
            return
        found.content.append(text[at : mark.start()])
        for call in read.calls:
            found.add(call.name, call.arguments, call.raw)
        at = _after(_BETWEEN_CALLS, text, end)
    found.content.append(text[at:])


def _json_calls(text: str, at: int, found: _Found) -> int:
    """Add a call, or a list of them. Returns: where they end. Raises: an error of _MALFORMED."""
    begin = _after(_SPACE, text, at)
    if not text.startswith("[", begin):
        return _json_call(text, begin, found)
    at = begin
    while at == begin or text.startswith(",", at):
        at = _after(_SPACE, text, _json_call(text, at + 1, found))
    return _expect(text, at, "]")


def _json_call(text: str, at: int, found: _Found, end: str = "") -> int:
    """Add a JSON object with a name and arguments, and what must follow it. Returns: where that ends."""
    members, behind = _members(text, _after(_SPACE, text, at))
    key = next((key for key in _ARGUMENTS if key in members), None)
    if "name" not in members or key is None:
        raise LookupError("it has no name and arguments")
    behind = _expect(text, behind, end) if end else behind
    found.add(members["name"][0], *members[key])
    return behind


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Parse a JSON object. Returns: the value and the text of each member, and where it ends. Raises: ValueError."""
    members: dict[str, tuple[Any, str]] = {}
    at = _expect(text, at, "{")
    while not text.startswith("}", at):
        at = _expect(text, at, ",") if members else at
        key, at = _DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key of it is no text")
        begin = _expect(text, at, ":")
        value, end = _DECODER.raw_decode(text, begin)
        members[key] = value, text[begin:end]
        at = _after(_SPACE, text, end)
    return members, at + 1


def _expect(text: str, at: int, expected: str) -> int:
    """Return the place behind `expected`, and the whitespace around it if it is of JSON. Raises: ValueError."""
    at = _after(_SPACE, text, at)
    if not text.startswith(expected, at):
        raise ValueError(f"{expected!r} is missing")
    at += len(expected)
    return at if len(expected) > 1 else _after(_SPACE, text, at)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _harmony(text: str, found: _Found, tools: Tools) -> None:
    """Read messages in channels: analysis is thinking, what has a recipient is a call, the rest is content."""
    for part in text.split("<|start|>"):
        header, is_message, body = part.partition("<|message|>")
        recipient = _HARMONY_RECIPIENT.search(header)
        if not is_message:
            found.content.append(part)
            continue
        body, *behind = _HARMONY_END.split(body, maxsplit=1)
        if recipient is not None:
            try:
                found.add(recipient[1], _DECODER.decode(body), body)
            except _MALFORMED as error:
                found.malformed(part, error)
                continue
        else:
            (found.thoughts if "<|channel|>analysis" in header else found.content).append(body)
        found.content += behind


def _string_arguments(name: str, tools: Tools) -> set[str]:
    """Return the arguments of a tool that its schema says are strings: `5` is then a text, no number."""
    functions = (function for tool in tools if isinstance(function := tool.get("function", tool), Mapping))
    schema = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    kinds = properties if isinstance(properties, Mapping) else {}
    return {key for key, kind in kinds.items() if isinstance(kind, Mapping) and kind.get("type") == "string"}


def _json_or_text(value: str) -> Any:
    try:
        return _DECODER.decode(value)
    except (ValueError, RecursionError):
        return value


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_json)
PARSERS: Mapping[str, Callable[[str, _Found, Tools], None]] = {
    "hermes": _hermes,
    "llama3_json": _bare,
    "json": _bare,
    "glm": _glm,
    "harmony": _harmony,
    "none": _plain,
}
# Marks of a template and the parser of its calls; the first that is found counts. Calls in XML are not parsed.
_MARKS = (
    (r"<\|channel\|>", "harmony"),
    (r"<arg_key>", "glm"),
    (r"<function=", "none"),
    (r"<tool_call>", "hermes"),
    (r"<\|python_tag\|>|\"parameters\": dictionary of", "llama3_json"),
    (r"\[TOOL_CALLS\]", "json"),
)
