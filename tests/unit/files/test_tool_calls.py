"""What is read of a turn's text: thinking, content, tool calls, and calls that are malformed."""

import json
import time

import pytest

from tandem_files.chat.parsing import PARSERS, ParsedTurn, parse_turn, parser_for
from tests.chats import GLM, HARMONY, LLAMA, MISTRAL, QWEN, TOOLS

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2,"b":  3}}\n</tool_call>'
GLM_ADD = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
ANALYSIS = "<|channel|>analysis<|message|>Use it."
CALL = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a":2}'


def calls(turn: ParsedTurn) -> list[tuple[str, object, str]]:
    return [(call.name, call.arguments, call.raw) for call in turn.tool_calls]


@pytest.mark.parametrize(
    ("parser", "text", "content", "expected"),
    [
        ("hermes", "It is 5. ", "It is 5. ", []),
        ("hermes", ADD, "", [("add", {"a": 2, "b": 3}, '{"a": 2,"b":  3}')]),
        (
            "hermes",
            f"First.\n{ADD} \n{ADD}\nThen.",
            "First.\nThen.",
            [("add", {"a": 2, "b": 3}, '{"a": 2,"b":  3}')] * 2,
        ),
        (
            "hermes",
            '<tool_call>{"arguments": {"t": "</tool_call><tool_call>"}, "name": "f"}</tool_call>',
            "",
            [("f", {"t": "</tool_call><tool_call>"}, '{"t": "</tool_call><tool_call>"}')],
        ),
        (
            "hermes",
            r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
            "",
            [("f", {"a": 1}, r'"{\"a\": 1}"')],
        ),
        ("hermes", 'I call {"name": "f", "arguments": {}}', 'I call {"name": "f", "arguments": {}}', []),
        ("llama3_json", ' {"name": "f", "parameters": {"a":1}} ', "", [("f", {"a": 1}, '{"a":1}')]),
        ("llama3_json", '<|python_tag|>{"name": "f", "arguments": {}}', "", [("f", {}, "{}")]),
        (
            "llama3_json",
            'I do:\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": [1]}}\nDone.',
            "I do:\nDone.",
            [("f", {}, "{}"), ("g", {"x": [1]}, '{"x": [1]}')],
        ),
        (
            "llama3_json",
            '{\n "name": "f",\n "parameters": {\n  "a": {"b": 1}\n }\n}',
            "",
            [("f", {"a": {"b": 1}}, '{\n  "a": {"b": 1}\n }')],
        ),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_json", "{x | x > 0}\n{1, 2}", "{x | x > 0}\n{1, 2}", []),
        (
            "json",
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]',
            "",
            [("f", {}, "{}"), ("g", {"a": 1}, '{"a": 1}')],
        ),
        ("json", '[\n{"name": "f", "arguments": {}}\n]', "", [("f", {}, "{}")]),
        ("json", "[1, 2, 3]", "[1, 2, 3]", []),
        (
            "glm",
            f"\nI add.\n{GLM_ADD}",
            "I add.",
            [("add", {"a": 2}, "<arg_key>a</arg_key>\n<arg_value>2</arg_value>")],
        ),
        (
            "glm",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>n</arg_key>"
            "<arg_value>[5]</arg_value></tool_call><tool_call>now</tool_call>",
            "",
            [
                (
                    "weather",
                    {"city": "5", "n": [5]},
                    "<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>n</arg_key><arg_value>[5]</arg_value>",
                ),
                ("now", {}, ""),
            ],
        ),
        ("harmony", "<|channel|>final<|message|>It is 5.", "It is 5.", []),
        ("harmony", f"{ANALYSIS}<|end|>{CALL}", "", [("add", {"a": 2}, '{"a":2}')]),
        (
            "harmony",
            "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a":2}<|call|>',
            "I add.",
            [("add", {"a": 2}, '{"a":2}')],
        ),
        ("none", ADD, ADD, []),
    ],
)
def test_content_and_calls_are_read(
    parser: str, text: str, content: str, expected: list[tuple[str, object, str]]
) -> None:
    turn = parse_turn(parser, text, tools=TOOLS)
    assert (turn.content, calls(turn), turn.errors) == (content, expected, ())
    assert len({call.id for call in turn.tool_calls}) == len(expected)


MALFORMED = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 2', "Expecting ',' delimiter"),
    ("hermes", "<tool_call>", "'{' is missing"),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "it has no name and arguments"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "its arguments a JSON object"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "its name must be a text"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogates not allowed"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "'</tool_call>' is missing"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}} {}</tool_call>', "'</tool_call>' is missing"),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "Expecting value"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000, "maximum recursion depth"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "Exceeds the limit"),
    ("llama3_json", '{"name": "f", "parameters": {"a": ', "Expecting value"),
    ("llama3_json", '{"name": "f", "parameters": "no object"}', "Expecting value"),
    ("llama3_json", "<|python_tag|>print(5)", "'{' is missing"),
    ("llama3_json", '<|python_tag|>{"name": "f"}', "it has no name and arguments"),
    ("json", '[TOOL_CALLS][{"name": "f", "arguments": {}}', "']' is missing"),
    ("glm", "<tool_call></tool_call>", "it has no name"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2", "'</tool_call>' is missing"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key></tool_call>", "'</tool_call>' is missing"),
]


@pytest.mark.parametrize(("parser", "text", "why"), MALFORMED, ids=[f"{case[0]}-{case[2]}" for case in MALFORMED])
def test_a_malformed_call_stays_in_the_content_and_is_named(parser: str, text: str, why: str) -> None:
    turn = parse_turn(parser, text, tools=TOOLS)
    assert (turn.content, turn.tool_calls) == (text, ())
    assert len(turn.errors) == 1
    assert turn.errors[0].startswith("tool call 1 is malformed: ")
    assert why in turn.errors[0]
    assert len(turn.errors[0]) < 300


def test_a_malformed_call_of_harmony_keeps_its_header() -> None:
    turn = parse_turn("harmony", f"{ANALYSIS}<|end|>{CALL[:-1]}<|call|>")
    assert turn.content == f"{CALL[:-1]}<|call|>".removeprefix("<|start|>")
    assert turn.reasoning == "Use it."
    assert len(turn.errors) == 1


def test_a_malformed_call_ends_where_the_next_begins() -> None:
    turn = parse_turn("hermes", f"a <tool_call>{{ b {ADD} c <tool_call>x</tool_call> d")
    assert [call.name for call in turn.tool_calls] == ["add"]
    assert turn.content == "a\n<tool_call>{ b\nc\n<tool_call>x</tool_call>\nd"
    assert [error.split(":")[0] for error in turn.errors] == ["tool call 1 is malformed", "tool call 3 is malformed"]


def test_of_bare_calls_those_before_a_malformed_one_are_kept() -> None:
    turn = parse_turn("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {')
    assert [call.name for call in turn.tool_calls] == ["f"]
    assert turn.content == '{"name": "g", "parameters": {'
    assert len(turn.errors) == 1


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nEasy.\n</think>\n\nIt is 5.", False, "Easy.", "It is 5."),
        ("\n<think></think>\nIt is 5.", False, "", "It is 5."),
        ("Easy.\n</think>\n\nIt is 5.", True, "Easy.", "It is 5."),
        ("<think>\nEasy.\n</think>\n\nIt is 5.", True, "Easy.", "It is 5."),
        ("<think>\nEas", False, "Eas", ""),
        ("Eas", True, "Eas", ""),
        ("Easy.\n</think>\n\nIt is 5.", False, None, "Easy.\n</think>\n\nIt is 5."),
        ("It is <think>5</think>.", False, None, "It is <think>5</think>."),
        (f"<think>{ADD}</think>no", False, ADD, "no"),
    ],
)
def test_thinking_is_what_a_turn_begins_with(text: str, opened: bool, reasoning: str | None, content: str) -> None:
    turn = parse_turn("hermes", text, opened=opened)
    assert (turn.reasoning, turn.content, turn.tool_calls) == (reasoning, content, ())


def test_the_parser_is_found_from_the_template() -> None:
    found = {text: parser_for(text) for text in (QWEN, LLAMA, GLM, HARMONY, MISTRAL)}
    assert list(found.values()) == ["hermes", "llama3_json", "glm", "harmony", "json"]
    assert parser_for("<tool_call><function={{ name }}>") == "none"
    assert parser_for("{{ messages }}") == "none"


def test_a_message_has_what_templates_look_for() -> None:
    turn = parse_turn("hermes", f"<think>Easy.</think>{ADD}")
    message = turn.message()
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert message["reasoning_content"] == "Easy."
    assert "content" not in message
    assert turn.message("thinking")["thinking"] == "Easy."
    assert parse_turn("hermes", "").message() == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("parser", PARSERS)
def test_long_texts_of_marks_are_read_in_one_pass(parser: str) -> None:
    """A policy may repeat a mark until it is cut off: 1 MB takes 0.2 s, and took minutes with a pass for each mark."""
    pieces = ["<tool_call>", '<tool_call>{"', "<tool_call>x<arg_key>", "<arg_key>a</arg_key><arg_value>", "{\n", "[\n",
              "\n" + " " * 50, '{"name":', "<|start|>", "<|python_tag|>", "}", "} \n{", "<|message|>", "<think>",
              "</think>", '{"name":\n', '{"name": 1}\n', '{"a":\n']  # fmt: skip
    start_s = time.process_time()
    for piece in pieces:
        text = piece * (60_000 // len(piece))
        turn = parse_turn(parser, text)
        written = "".join([turn.content, *(json.dumps(call.arguments) for call in turn.tool_calls)])
        assert turn.reasoning is not None or parser == "harmony" or written.strip() == text.strip()
    assert time.process_time() - start_s < 3
