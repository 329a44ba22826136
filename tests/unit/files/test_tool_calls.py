"""What is read of a turn's text: thinking, content, tool calls, and calls that are malformed."""

import json
import time

import pytest

from tandem_files.chat.parsing import ParsedTurn, parse_turn
from tandem_files.chat.tool_calls import PARSERS, parser_for
from tests.chats import DEEPSEEK, GLM, HARMONY, LLAMA, MISTRAL, QWEN, QWEN_XML, TOOLS

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2,"b":  3}}\n</tool_call>'
GLM_ADD = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
XML_ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nx\n y\n</parameter>\n"
    "</function>\n</tool_call>"
)
DEEPSEEK_ADD = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a":2}\n```<｜tool▁call▁end｜>'
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
        ("qwen3_coder", f"I add.\n\n{XML_ADD}", "I add.", [("add", {"a": 2, "b": "x\n y"}, XML_ADD[27:-25])]),
        (
            "qwen3_coder",
            "<tool_call><function=weather><parameter=city>5</parameter><parameter=dry>True</parameter><parameter=n>"
            "[5]</parameter></function></tool_call><tool_call>\n<function=now>\n</function>\n</tool_call>",
            "",
            [
                (
                    "weather",
                    {"city": "5", "dry": True, "n": [5]},
                    "<parameter=city>5</parameter><parameter=dry>True</parameter><parameter=n>[5]</parameter>",
                ),
                ("now", {}, ""),
            ],
        ),
        (
            "deepseek",
            f"I add.<｜tool▁calls▁begin｜>{DEEPSEEK_ADD}\n{DEEPSEEK_ADD}<｜tool▁calls▁end｜>Then.",
            "I add.\nThen.",
            [("add", {"a": 2}, '{"a":2}')] * 2,
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("add", {}, "{}")],
        ),
        ("deepseek", "It is 5. ", "It is 5. ", []),
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
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "not JSON compliant"),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1e999</arg_value></tool_call>", "not JSON compliant"),
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
    ("qwen3_coder", "<tool_call>\n</tool_call>", "it has no name"),
    ("qwen3_coder", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "it has no name"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>2</function></tool_call>", "'</function>' is missing"),
    ("qwen3_coder", "<tool_call><function=add></function>", "'</tool_call>' is missing"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add", "'<｜tool▁sep｜>' is missing"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add<｜tool▁call▁end｜>", "it has no name and arguments"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}\n```", "'<｜tool▁call▁end｜>' is missing"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add```json\n[1]```<｜tool▁call▁end｜>", "a JSON object"),
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
    found = {text: parser_for(text) for text in (QWEN, QWEN_XML, LLAMA, GLM, HARMONY, MISTRAL, DEEPSEEK)}
    assert list(found.values()) == ["hermes", "qwen3_coder", "llama3_json", "glm", "harmony", "json", "deepseek"]
    assert parser_for("<tool_call><function={{ name }}>") == "qwen3_coder"
    assert parser_for("<function={{ name }}>{{ arguments }}</function>") == "none"
    assert parser_for("{{ messages }}") == "none"


def test_a_message_has_what_templates_look_for() -> None:
    turn = parse_turn("hermes", f"<think>Easy.</think>{ADD}")
    message = turn.message()
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert message["reasoning_content"] == "Easy."
    assert "content" not in message
    assert turn.message("thinking")["thinking"] == "Easy."
    assert parse_turn("hermes", "").message() == {"role": "assistant", "content": ""}


KINDS = [
    ({"type": "string"}, "5", "5"),
    ({"type": ["string"]}, "true", "true"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
    ({"type": "string"}, "None", "None"),
    ({"type": "boolean"}, "False", False),
    ({"type": "number"}, "2.5", 2.5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "array"}, '["a"]', ["a"]),
    ({}, "{", "{"),
    ("odd", "1", 1),
]


@pytest.mark.parametrize(("kind", "text", "value"), KINDS, ids=str)
@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("qwen3_coder", "<tool_call><function=f><parameter=a>\n{}\n</parameter></function></tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"),
    ],
)
def test_values_without_quotes_are_of_the_schemas_types(
    parser: str, call: str, kind: object, text: str, value: object
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": kind}}}}]
    (found,) = parse_turn(parser, call.replace("{}", text), tools=tools).tool_calls
    assert found.arguments == {"a": value}
    assert type(found.arguments["a"]) is type(value)


@pytest.mark.parametrize("parser", PARSERS)
def test_long_texts_of_marks_are_read_in_one_pass(parser: str) -> None:
    """A policy may repeat a mark until it is cut off: 1 MB takes 0.2 s, and took minutes with a pass for each mark."""
    pieces = ["<tool_call>", '<tool_call>{"', "<tool_call>x<arg_key>", "<arg_key>a</arg_key><arg_value>", "{\n", "[\n",
              "\n" + " " * 50, '{"name":', "<|start|>", "<|python_tag|>", "}", "} \n{", "<|message|>", "<think>",
              "</think>", "<tool_call><function=a><parameter=", "<parameter=a>",
              "<｜tool▁call▁begin｜>a", "<｜tool▁sep｜>{", '{"name":\n', '{"name": 1}\n', '{"a":\n']  # fmt: skip
    start_s = time.process_time()
    for piece in pieces:
        text = piece * (60_000 // len(piece))
        turn = parse_turn(parser, text)
        written = "".join([turn.content, *(json.dumps(call.arguments) for call in turn.tool_calls)])
        assert turn.reasoning is not None or parser == "harmony" or written.strip() == text.strip()
    assert time.process_time() - start_s < 3
