"""Runs in a worker: tools are plain functions; their schemas, and the environment that runs a turn's calls of them."""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs, CoreSchema, to_jsonable_python

from coordinator.workers.episodes.replies import MOST_CHARS, AssistantTurn, Message
from coordinator.workers.limits import Late, WallTimer, relieve
from coordinator.workers.own_code import kind_of
from coordinator.workers.signature import Unfit

# Part of a turn's time after which its calls are errors, so that the turn itself is not late.
_SHARE = 0.9
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ARGS = ("args:", "arguments:", "parameters:")


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: CoreSchema) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class UserTool:
    """A function that the policy may call.

    Attributes:
        schema: OpenAI's: type function, and in it name, description, parameters.
        call: calls it with checked arguments. Raises: ValidationError: they do not fit; whatever it raises.
    """

    schema: Mapping[str, Any]
    is_async: bool
    call: Callable[[Mapping[str, Any]], Any]


def read_tools(functions: Sequence[tuple[str, Any]]) -> dict[str, UserTool]:
    """Describe functions as tools, by name. Raises: Unfit: one cannot be a tool; says why.

    Args:
        functions: the place and the function, of each.
    """
    tools: dict[str, UserTool] = {}
    for place, function in functions:
        name = getattr(function, "__name__", "")
        if not inspect.isfunction(function):
            raise Unfit(f"the tool in {place} is {kind_of(function)}, not a function")
        if name in tools:
            raise Unfit(f"two tools are called {name}: give one of them another name")
        tools[name] = _tool(function, f"the tool {name} in {place}")
    return tools


def _tool(function: Callable[..., Any], where: str) -> UserTool:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise Unfit(f"{where} yields its result: it must return it")
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in _BY_NAME:
            raise Unfit(f"{where} takes {str(parameter).partition(':')[0]}; each of its parameters needs a name")
        if parameter.annotation is parameter.empty:
            raise Unfit(f"{where}: its parameter {name!r} has no type, e.g. {name}: str")
    try:
        adapter = TypeAdapter[Any](function)  # type: ignore[arg-type] # a function is its arguments
        parameters = _inlined(adapter.json_schema(schema_generator=_Untitled))
    except (PydanticUserError, NameError) as error:
        raise Unfit(f"{where} has a parameter of which no JSON schema can be made: {_first_line(error)}") from error
    description, texts = read_docstring(inspect.getdoc(function) or "")
    unknown = [name for name in texts if name not in parameters["properties"]]
    if unknown:
        raise Unfit(f"{where}: its docstring describes {unknown[0]!r}, which is no parameter")
    for name, text in texts.items():
        parameters["properties"][name] = {"description": text, **parameters["properties"][name]}
    about = {"name": function.__name__, "description": description, "parameters": parameters}
    return UserTool(
        schema={"type": "function", "function": {name: part for name, part in about.items() if part != ""}},
        is_async=inspect.iscoroutinefunction(function),
        call=lambda arguments: adapter.validator.validate_python(ArgsKwargs((), dict(arguments))),
    )


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Read a docstring. Returns: its first paragraph, and the texts of its `Args:` section, by parameter.

    >>> read_docstring("Add two\\nnumbers.\\n\\nArgs:\\n    a: one,\\n        an integer\\n    b (int): the other")
    ('Add two numbers.', {'a': 'one, an integer', 'b': 'the other'})
    """
    lines = text.splitlines()
    begin = next((place for place, line in enumerate(lines) if line.strip().lower() in _ARGS), len(lines))
    first = " ".join("\n".join(lines[:begin]).strip().partition("\n\n")[0].split())
    found: dict[str, str] = {}
    name, indent = "", 0
    for line in lines[begin + 1 :]:
        own = len(line) - len(line.lstrip())
        if line.strip() and own == 0:
            break  # the next section
        head, colon, rest = line.partition(":")
        if line.strip() and colon and (not found or own <= indent):
            name, indent = head.split("(")[0].strip(), own
            found[name] = rest.strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return first, found


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Put definitions that refer to no others in the places where they are used: templates show no `$defs`."""
    definitions = schema.pop("$defs", {})
    flat = {f"#/$defs/{name}": part for name, part in definitions.items() if "$ref" not in json.dumps(part)}

    def put(part: Any) -> Any:
        if isinstance(part, list):
            return [put(inner) for inner in part]
        if not isinstance(part, dict):
            return part
        found = {name: put(inner) for name, inner in part.items() if name != "$ref" or inner not in flat}
        place = part.get("$ref")
        inner = flat.get(place, {}) if isinstance(place, str) else {}
        return {**{name: text for name, text in inner.items() if name != "title"}, **found}

    rest = {name: put(part) for name, part in definitions.items() if f"#/$defs/{name}" not in flat}
    inlined: dict[str, Any] = put(schema)
    return {**inlined, "$defs": rest} if rest else inlined


class ToolEnvironment:
    """Runs the calls of each turn, in order; done when a turn has none. What fails is the text of a tool's message.

    Args:
        turn_timeout_s: seconds for all calls of a turn.
    """

    def __init__(self, tools: Mapping[str, UserTool], timer: WallTimer, turn_timeout_s: float) -> None:
        self._tools = tools
        self._timer = timer
        self._within_s = _SHARE * turn_timeout_s

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Append nothing to the prompt."""
        return []

    async def step(self, turn: AssistantTurn) -> tuple[list[Message], None, bool]:
        """Run the calls. Returns: a message for each of them; no reward: the final answer is scored."""
        until_s = time.monotonic() + self._within_s
        messages = [await self._answer(place, call, until_s) for place, call in enumerate(turn.tool_calls)]
        return messages, None, not messages

    async def _answer(self, place: int, call: Mapping[str, Any], until_s: float) -> Message:
        function = call.get("function") or {}
        name = str(function.get("name", ""))
        text = await self._result(name, function.get("arguments") or {}, until_s)
        text = text.encode(errors="replace").decode()  # half a surrogate pair, of a file's name for instance
        return {"role": "tool", "tool_call_id": str(call.get("id") or place), "name": name, "content": text}

    async def _result(self, name: str, arguments: Any, until_s: float) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}; there are {', '.join(self._tools)}"
        if not isinstance(arguments, Mapping):
            return f"error: the arguments are {kind_of(arguments)}, not an object"
        within_s = until_s - time.monotonic()
        late = f"error: the calls of this turn took longer than {self._within_s:g} s"
        if within_s <= 0:
            return late
        try:
            return _text(await self._call(tool, arguments, within_s))
        except Late:
            return late
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
            return f"error: {'; '.join(faults)}"
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of a tool: the policy reads it
            relieve(error)
            return f"error: {type(error).__name__}: {_first_line(error)}"

    async def _call(self, tool: UserTool, arguments: Mapping[str, Any], within_s: float) -> Any:
        value = self._timer.run(lambda: tool.call(arguments), within_s)
        if not inspect.isawaitable(value):
            return value
        try:
            async with asyncio.timeout(within_s) as limit:
                return await value
        except TimeoutError:  # or one of the tool's own
            if limit.expired():
                raise Late from None
            raise


def _text(value: Any) -> str:
    """Write a result. Raises: ValueError: it is too long; what making JSON of it does."""
    is_text = isinstance(value, str)
    text: str = value if is_text else json.dumps(to_jsonable_python(value, fallback=_plain), ensure_ascii=False)
    if len(text) > MOST_CHARS:
        raise ValueError(f"the result has {len(text)} characters; at most {MOST_CHARS} can be read")
    return text


def _plain(value: Any) -> Any:
    """Return what JSON has of a number or an array of NumPy or torch; of anything else its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _first_line(error: BaseException) -> str:
    try:
        return str(error).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - of a user's class
        return ""
