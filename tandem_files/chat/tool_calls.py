"""Parsers of tool calls: one for each way in which chat templates write them, found by marks in the template.

A call that cannot be read stays in the content as it was written, and an error names it: nothing is dropped or raised.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

Tools = Sequence[Mapping[str, Any]]
_CALLED, _CALLED_END = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_PYTHON = {"True": True, "False": False, "None": None}
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_ALL, _DEEPSEEK_ALL_END, _DEEPSEEK_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
# V3 and R1 have the kind of the tool before the separator, and behind it the name and a block of JSON.
_DEEPSEEK_NAME = re.compile(r"\s*([^\s`<{]+)\s*```(?:json)?")


class _Pairs(NamedTuple):
    """How a call with pairs is written: its name, a pair, and what closes the pairs."""

    name: re.Pattern[str]
    pair: re.Pattern[str]
    end: str = ""


# `<tool_call>name`, then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>`.
_GLM = _Pairs(
    re.compile(r"\s*([^\s<]+)\s*"),
    re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL),
)
# `<function=name>`, then `<parameter=key>value</parameter>`, then `</function>`.
_XML = _Pairs(
    re.compile(r"\s*<function=([^\s<>]+)>\s*"),
    re.compile(r"<parameter=([^<>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
    "</function>",
)
# Where a bare call may begin: behind a marker, with a line, behind another. One begins with such a key.
_BARE = re.compile(r"(<\|python_tag\|>|\[TOOL_CALLS\])|^(?=[ \t]*[{\[])|(?<=[;}])(?=\s*\{)", re.MULTILINE)
_BARE_ATTEMPT = re.compile(r'\s*\[?\s*\{\s*"(?:name|arguments|parameters|type)"\s*:')
_SPACE, _BETWEEN_CALLS, _FENCE = re.compile(r"\s*"), re.compile(r"[\s;]*"), re.compile(r"\s*```")
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


@dataclass(slots=True)
class FoundCalls:
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
        # Half a surrogate pair and 1e999 can be written in JSON, and cannot be sent to a tool.
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
        self.calls.append(ToolCall(name=name, arguments=arguments, raw=raw, id=f"call{len(self.calls):05}"))

    def malformed(self, text: str, error: Exception) -> None:
        """Keep a call that cannot be read as content, and name it."""
        number = len(self.calls) + len(self.errors) + 1
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        self.errors.append(f"tool call {number} is malformed: {error}: {shown!r}")
        self.content.append(text)


def parser_for(template_text: str) -> str:
    """Return the name of the parser of the calls that a chat template writes, by marks in its text.

    >>> parser_for("<|im_start|>assistant <tool_call>"), parser_for("User: {{ messages[0].content }}")
    ('hermes', 'none')
    """
    return next((name for mark, name in _MARKS if re.search(mark, template_text)), "none")


def _plain(text: str, found: FoundCalls, tools: Tools) -> None:
    found.content.append(text)


def _hermes(text: str, found: FoundCalls, tools: Tools) -> None:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    _tagged(text, found, lambda at, stop: _json_call(text, at, found, end=_CALLED_END))


def _pairs(form: _Pairs, text: str, found: FoundCalls, tools: Tools) -> None:
    """Read `<tool_call>`, a name, pairs of keys and values, and `</tool_call>`."""

    def read(at: int, stop: int) -> int:
        name, arguments = form.name.match(text, at, stop), dict[str, Any]()
        if name is None:
            raise ValueError("it has no name")
        end, kinds = name.end(), _kinds_of(name[1], tools)
        while (pair := form.pair.match(text, end, stop)) is not None:
            key = pair[1].strip()
            arguments[key], end = _value(pair[2], kinds.get(key, frozenset())), pair.end()
        closed = _expect(text, _expect(text, end, form.end) if form.end else end, _CALLED_END)
        found.add(name[1], arguments, text[name.end() : end].rstrip())
        return closed

    _tagged(text, found, read)


def _deepseek(text: str, found: FoundCalls, tools: Tools) -> None:
    """Read `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` of V3.1, or V3's and R1's form of it."""

    def read(at: int, stop: int) -> int:
        sep = text.find(_DEEPSEEK_SEP, at, stop)
        if sep < 0:
            raise ValueError(f"{_DEEPSEEK_SEP!r} is missing")
        name, begin = text[at:sep], _after(_SPACE, text, sep + len(_DEEPSEEK_SEP))
        if not text.startswith("{", begin):
            named = _DEEPSEEK_NAME.match(text, begin, stop)
            if named is None:
                raise ValueError("it has no name and arguments")
            name, begin = named[1], _after(_SPACE, text, named.end())
        arguments, end = _DECODER.raw_decode(text, begin)
        closed = _expect(text, _after(_FENCE, text, end), _DEEPSEEK[1])
        found.add(name.strip(), arguments, text[begin:end])
        return closed

    _tagged(text, found, read, _DEEPSEEK)
    if found.calls:  # the marks around all calls
        pieces = [piece.strip().removeprefix(_DEEPSEEK_ALL_END) for piece in found.content]
        found.content = [piece.removesuffix(_DEEPSEEK_ALL) for piece in pieces]


def _tagged(
    text: str, found: FoundCalls, read: Callable[[int, int], int], tags: tuple[str, str] = (_CALLED, _CALLED_END)
) -> None:
    """Read calls between tags.

    Args:
        read: adds the call between two places. Returns: where its closing tag ends. Raises: an error of _MALFORMED.
    """
    at = 0
    while (begin := text.find(tags[0], at)) >= 0:
        found.content.append(text[at:begin])
        inside = begin + len(tags[0])
        stop = _end_of_malformed(text, inside, tags)
        try:
            at = read(inside, stop)
        except _MALFORMED as error:
            found.malformed(text[begin:stop], error)
            at = stop
    found.content.append(text[at:])


def _end_of_malformed(text: str, at: int, tags: tuple[str, str]) -> int:
    """Return how far a malformed call reaches: to its closing tag, the next call, or the end of the text."""
    following = text.find(tags[0], at)
    stop = following if following >= 0 else len(text)
    close = text.find(tags[1], at, stop)
    return close + len(tags[1]) if close >= 0 else stop


def _bare(text: str, found: FoundCalls, tools: Tools) -> None:
    """Read JSON objects with a name and arguments, or lists of them, that begin a line or follow a marker or a call."""
    at = end = 0
    for mark in _BARE.finditer(text):
        is_attempt = mark[1] is not None or _BARE_ATTEMPT.match(text, mark.end()) is not None
        if mark.start() < end or not is_attempt:  # within a call, or an answer with braces
            continue
        read = FoundCalls()
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


def _json_calls(text: str, at: int, found: FoundCalls) -> int:
    """Add a call, or a list of them. Returns: where they end. Raises: an error of _MALFORMED."""
    begin = _after(_SPACE, text, at)
    if not text.startswith("[", begin):
        return _json_call(text, begin, found)
    at = begin
    while at == begin or text.startswith(",", at):
        at = _after(_SPACE, text, _json_call(text, at + 1, found))
    return _expect(text, at, "]")


def _json_call(text: str, at: int, found: FoundCalls, end: str = "") -> int:
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


def _harmony(text: str, found: FoundCalls, tools: Tools) -> None:
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


def _kinds_of(name: str, tools: Tools) -> Mapping[str, frozenset[str]]:
    """Return the types that a tool's schema says of its arguments."""
    functions = (function for tool in tools if isinstance(function := tool.get("function", tool), Mapping))
    schema = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return {key: _kinds(kind) for key, kind in (properties if isinstance(properties, Mapping) else {}).items()}


def _kinds(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    choices = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(choices, list):
        return frozenset().union(*map(_kinds, choices))
    kind = schema.get("type")
    return frozenset(filter(lambda one: isinstance(one, str), kind if isinstance(kind, list) else [kind]))


def _value(text: str, kinds: frozenset[str]) -> Any:
    """Return the value of a text without quotes: `5` is a text where the schema says string, else a number."""
    if "string" in kinds and kinds <= {"string", "null"}:
        return None if "null" in kinds and text in ("null", "None") else text
    try:
        return _PYTHON[text] if text in _PYTHON else _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_json)
PARSERS: Mapping[str, Callable[[str, FoundCalls, Tools], None]] = {
    "hermes": _hermes,
    "llama3_json": _bare,
    "json": _bare,
    "glm": partial(_pairs, _GLM),
    "qwen3_coder": partial(_pairs, _XML),
    "deepseek": _deepseek,
    "harmony": _harmony,
    "none": _plain,
}
# Marks of a template and the parser of its calls; the first that is found counts.
_MARKS = (
    (r"<\|channel\|>", "harmony"),
    (r"<arg_key>", "glm"),
    (r"<tool_call>(?:\\n|\s)*<function=", "qwen3_coder"),
    (_DEEPSEEK[0], "deepseek"),
    (r"<tool_call>", "hermes"),
    (r"<\|python_tag\|>|\"parameters\": dictionary of", "llama3_json"),
    (r"\[TOOL_CALLS\]", "json"),
)
