"""What users' environments may return, and what their functions become as tools: tables, without a process."""

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Optional

import numpy as np
import pytest

from coordinator.workers.episodes.replies import BadReply, messages_of, step_of
from coordinator.workers.episodes.serving import _check_class
from coordinator.workers.episodes.tools import UserTool, read_docstring, read_tools
from coordinator.workers.signature import Unfit

HELLO = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "hello!", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (([HELLO], 1, False), ([HELLO], 1.0, False)),
        ([[], None, True], ([], None, True)),
        ({"messages": (HELLO,), "done": False}, ([HELLO], None, False)),
        ({"reward": True, "done": True}, ([], 1.0, True)),
        ({"token_ids": (3, 0), "reward": 2, "done": False}, ({"token_ids": [3, 0]}, 2.0, False)),
        ({"conversation": [HELLO, SAID, HELLO], "done": False}, ({"conversation": [HELLO, SAID, HELLO]}, None, False)),
        (([HELLO], np.float32(0.5), np.bool_(False)), ([HELLO], 0.5, False)),
        ({"reward": np.int64(2), "done": np.bool_(True)}, ([], 2.0, True)),
        ({"token_ids": np.array([3, 0]), "done": False}, ({"token_ids": [3, 0]}, None, False)),
        ({"token_ids": [np.int32(3)], "done": False}, ({"token_ids": [3]}, None, False)),
    ],
)
def test_a_step_returns_a_tuple_or_a_dict(value: Any, found: Any) -> None:
    assert step_of(value) == found


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (None, "step returned None, not (messages, reward, done)"),
        ((HELLO, 0.0), "a tuple of 2, not (messages, reward, done)"),
        (([HELLO], 0.0, False, False, {}), "a tuple of 5"),
        ({"messages": []}, "a dict without 'done'"),
        (
            {"done": True, "info": {}},
            "a dict with 'info'; its keys are messages (or conversation, or token_ids), reward",
        ),
        ({"token_ids": [1], "done": True}, "step returned token_ids and not done=False: the next turn answers it"),
        ({"token_ids": [1], "messages": [HELLO], "done": False}, "'token_ids' beside another thing to follow the turn"),
        ({"token_ids": [1, -1], "done": False}, "step returned token_ids with -1 (1), an int: no id of a token"),
        ({"token_ids": [2**31], "done": False}, "step returned token_ids with 2147483648 (0), an int"),
        ({"token_ids": [True], "done": False}, "token_ids with True (0), a bool"),
        ({"token_ids": "77", "done": False}, "a str as token_ids"),
        ({"token_ids": 7, "done": False}, "an int as token_ids, which must be a list of ids"),
        ({"conversation": "text", "done": False}, "a str as conversation, not a list of messages"),
        ({"conversation": [HELLO, SAID], "done": False}, "ends with the assistant, whose turn it is"),
        (
            {"conversation": [HELLO, {"role": "x"}], "done": False},
            "a conversation with a message (1) without 'content'",
        ),
        (
            {"conversation": [SAID | {"content": [1]}, HELLO], "done": False},
            "of the assistant whose content is no text",
        ),
        ({"conversation": [{"role": "assistant"}, HELLO], "done": False}, "of the assistant whose content is no text"),
        ({"conversation": [HELLO], "reward": "1", "done": False}, "step returned as its reward a str"),
        (([], 0.0, 1), "an int as done, which must be True or False"),
        (("text", 0.0, False), "step returned a str, not a list of messages such as [{'role'"),
        ((HELLO, 0.0, False), "step returned a dict, not a list of messages"),
        (([], math.nan, True), "step returned as its reward nan, which is not finite"),
        (([], "1", True), "step returned as its reward a str, not a number"),
        (([], 10**400, True), "step returned as its reward inf, which is not finite"),
        (
            ([{"role": "user", "content": "a\ud800"}], None, False),
            r"is not Unicode: it holds \ud800, half of a surrogate",
        ),
        ({"conversation": [SAID | {"x": "\udfff"}, HELLO], "done": False}, r"a message (0) that is not Unicode: it"),
        ({"conversation": [SAID | {"x": {1}}, HELLO], "done": False}, "(0) that is not JSON: Object of type set"),
        (([HELLO], 1.0, True), "messages after done"),
        (([], None, False), "neither messages nor done"),
        ((["hello"], None, False), "a message (0) that is a str, not a dict with role and content"),
        (([HELLO, {"content": "x"}], None, False), "a message (1) without 'role'"),
        (([{"role": "user"}], None, False), "without 'content'"),
        (
            ([{"role": "assistant", "content": "x"}], None, False),
            "of the role 'assistant'; those of an environment are",
        ),
        (([{"role": "user", "content": None}], None, False), "whose content is None, not a text"),
        (([{"role": "tool", "content": "x", "tool_call_id": 3}], None, False), "whose tool_call_id is an int"),
        (([HELLO | {"cache": "x"}], None, False), "with 'cache'; its keys are role, content, name, tool_call_id"),
        (
            ([HELLO | {"content": "x" * 2**21}], None, False),
            "whose content has 2097152 characters; a message has at",
        ),
        (([HELLO | {"images": ["x"]}], None, False), "with an image; only texts"),
        (([{"role": "user", "content": [{"type": "image_url"}]}], None, False), "with an image; only texts"),
        (([{"role": "user", "content": [{"type": "text"}]}], None, False), "whose content is a list, not a text"),
    ],
)
def test_what_a_step_must_not_return_is_named(value: Any, part: str) -> None:
    with pytest.raises(BadReply) as raised:
        step_of(value)
    assert part in str(raised.value)


async def forgotten() -> Any:
    return [HELLO], 1.0, False


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (lambda it: it, "step returned a coroutine (without `await`?), not (messages"),
        (lambda it: (it, None, False), "a coroutine (without `await`?), not a list of messages"),
        (lambda it: ([], it, True), "as its reward a coroutine (without `await`?), not a number"),
        (lambda it: {"conversation": it, "done": False}, "a coroutine (without `await`?) as conversation"),
        (lambda it: ([{"role": "user", "content": it}], None, False), "content is a coroutine (without `await`?)"),
    ],
)
def test_an_await_that_was_forgotten_is_named(reply: Callable[[Any], Any], part: str) -> None:
    coroutine = forgotten()
    with pytest.raises(BadReply) as raised:
        step_of(reply(coroutine))
    coroutine.close()
    assert part in str(raised.value)


def test_a_reset_may_append_nothing() -> None:
    assert messages_of([], "reset") == []
    with pytest.raises(BadReply, match="reset returned None, not a list of messages"):
        messages_of(None, "reset")


class Good:
    def __init__(self, depth: int = 1) -> None: ...
    def reset(self, row: Any, seed: int) -> Any: ...
    @staticmethod
    def step(turn: Any) -> Any: ...


def without(name: str, **methods: Any) -> Any:
    return type("Env", (), {key: code for key, code in {**vars(Good), **methods}.items() if key != name})


@pytest.mark.parametrize(
    ("environment", "args", "part"),
    [
        (len, {}, "is a builtin_function_or_method, not a class with the methods reset and step"),
        (without("step"), {}, "has no method step: it needs def step(self, turn), async or not"),
        (without("", reset=7), {}, "has no method reset"),
        (without("", reset=lambda self, row: []), {}, "reset(self, row) does not fit: too many positional"),
        (without("", step=lambda self, turn, info: []), {}, "missing a required argument: 'info'; it needs def step"),
        (without("", close=lambda self, why: None), {}, "close(self, why) does not fit"),
        (Good, {"dept": 2}, "its constructor(depth: int = 1) -> None does not fit: got an unexpected keyword"),
        (without("", __init__=lambda self, size: None), {}, "missing a required argument: 'size'; it gets env"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(environment: Any, args: dict[str, Any], part: str) -> None:
    with pytest.raises(Unfit) as raised:
        _check_class(environment, "Env in e.py", args)
    assert "Env in e.py" in str(raised.value)
    assert part in str(raised.value)


def test_one_that_can_is_not() -> None:
    _check_class(Good, "Good", {"depth": 2})


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


async def search(
    query: str,
    limit: int = 3,
    exact: bool = False,
    weights: list[float] | None = None,
    colour: Colour = Colour.RED,
    order: Literal["up", "down"] = "up",
    title: Optional[str] = None,  # noqa: UP045 - as users write it
    extra: dict[str, Any] = {},  # noqa: B006
) -> str:
    """Find documents
    by their words.

    Slow on Mondays.

    Args:
        query: words, as in
            a title: in any order
        limit (int): most documents

    Returns: lines.
    """
    return f"{query} {limit} {colour}"


NULL = {"type": "null"}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find documents by their words.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["query"],
            "properties": {
                "query": {"type": "string", "description": "words, as in a title: in any order"},
                "limit": {"type": "integer", "default": 3, "description": "most documents"},
                "exact": {"type": "boolean", "default": False},
                "weights": {"anyOf": [{"type": "array", "items": {"type": "number"}}, NULL], "default": None},
                "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                "order": {"type": "string", "enum": ["up", "down"], "default": "up"},
                "title": {"anyOf": [{"type": "string"}, NULL], "default": None},
                "extra": {"type": "object", "additionalProperties": True, "default": {}},
            },
        },
    },
}  # fmt: skip


def tool_of(function: Callable[..., Any]) -> UserTool:
    (tool,) = read_tools([("t.py", function)]).values()
    return tool


async def test_a_function_is_a_tool_by_its_signature_and_docstring() -> None:
    tool = tool_of(search)
    assert (tool.schema, tool.is_async) == (SCHEMA, True)
    assert await tool.call({"query": "a", "limit": "5", "colour": "blue"}) == "a 5 Colour.BLUE"


def plain(a: int) -> int:
    return a


def test_a_tool_without_a_docstring_has_no_description() -> None:
    tool = tool_of(plain)
    assert "description" not in tool.schema["function"]
    assert (tool.is_async, tool.call({"a": 1})) == (False, 1)


def test_sections_of_a_docstring() -> None:
    assert read_docstring("") == ("", {})
    assert read_docstring("One.\n\nArgs:\n    a: x\n\nRaises:\n    b: y") == ("One.", {"a": "x"})


def untyped(query, limit: int = 1) -> None: ...  # type: ignore[no-untyped-def]
def starred(*words: str) -> None: ...
def open_ended(**words: str) -> None: ...
def positional(word: str, /) -> None: ...
def odd(code: Callable[[int], int], lock: "NoSuchType") -> None: ...  # type: ignore[name-defined] # noqa: F821
def streams(channel: pytest.MonkeyPatch) -> None: ...


def described(a: int) -> None:
    """Do it.

    Args:
        b: what is no parameter
    """


def yields(a: int) -> Any:
    yield a


async def yields_later(a: int) -> Any:
    yield a


@pytest.mark.parametrize(
    ("functions", "part"),
    [
        ([untyped], "the tool untyped in t.py: its parameter 'query' has no type, e.g. query: str"),
        ([starred], "takes *words; each of its parameters needs a name"),
        ([open_ended], "takes **words"),
        ([positional], "takes word"),
        ([odd], "the tool odd in t.py has a parameter of which no JSON schema can be made"),
        ([streams], "the tool streams in t.py has a parameter of which no JSON schema can be made: Unable to generate"),
        ([described], "its docstring describes 'b', which is no parameter"),
        ([plain, plain], "two tools are called plain"),
        ([yields], "the tool yields in t.py yields its result: it must return it"),
        ([yields_later], "the tool yields_later in t.py yields its result"),
        ([Colour], "the tool in t.py is an EnumType, not a function"),
    ],
)  # fmt: skip
def test_functions_that_cannot_be_tools_are_refused(functions: Sequence[Any], part: str) -> None:
    with pytest.raises(Unfit) as raised:
        read_tools([("t.py", function) for function in functions])
    assert part in str(raised.value)
