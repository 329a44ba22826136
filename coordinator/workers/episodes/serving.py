"""Runs in a worker: holds the open episodes of a user's environment, and calls its methods."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from coordinator.workers.episodes.replies import AssistantTurn, BadReply, messages_of, step_of
from coordinator.workers.episodes.tools import ToolEnvironment, read_tools
from coordinator.workers.limits import WallTimer
from coordinator.workers.own_code import describe, find_code, import_code, kind_of
from coordinator.workers.signature import Unfit
from coordinator.workers.task import Work

RESET, STEP, CLOSE, CHECK = "reset", "step", "close", "check_args"
# The parameters of an environment's methods.
METHODS: Mapping[str, Sequence[str]] = {RESET: ("row", "seed"), STEP: ("turn",), CLOSE: ()}


def load(
    code: Sequence[Sequence[str]],
    sources: Mapping[str, Mapping[str, str] | None],
    args: Mapping[str, Any],
    as_tools: bool,
    turn_timeout_s: float,
) -> Work:
    """Import an environment, or tools, and check how they are called.

    Args:
        code: place and name of the class, or of each tool.
        sources: by place, as for own_code.load.
        args: of the constructor.
        as_tools: whether `code` are tools.
        turn_timeout_s: seconds for a call.
    Returns: work whose jobs are [episode, method, *arguments]; `form` has is_async and the schemas of the tools.
        A value is what the method returned, or `{"bad_reply": why}`.
    Raises: Unfit: it cannot be used; says why.
    """
    modules = {place: import_code(place, sources.get(place)) for place, _ in code}
    timer = WallTimer(turn_timeout_s)
    (place, name), *_ = code
    if as_tools:
        tools = read_tools([(place, find_code(modules[place][0], name, place)) for place, name in code])
        make: Callable[[], Any] = partial(ToolEnvironment, tools, timer, turn_timeout_s)
        is_async = any(tool.is_async for tool in tools.values())
        schemas = [tool.schema for tool in tools.values()]
    else:
        environment = find_code(modules[place][0], name, place, alike=inspect.isclass)
        _check_class(environment, f"{name} in {place}", args)
        _check_args(environment, f"{name} in {place}", args, modules[place][1])
        make, schemas = (lambda: environment(**deepcopy(args))), None
        is_async = any(inspect.iscoroutinefunction(getattr(environment, method, None)) for method in METHODS)
    return Work(
        call=_Episodes(make, timer).call,
        is_async=True,
        form={"is_async": is_async, "tools": schemas},
        describe=lambda error: describe(error, modules[place][1]),
    )


class _Episodes:
    """The environments of the open episodes, by the numbers of these.

    Args:
        make: builds one.
        timer: interrupts methods that are no coroutines.
    """

    def __init__(self, make: Callable[[], Any], timer: WallTimer) -> None:
        self._make = make
        self._timer = timer
        self._open: dict[int, Any] = {}

    async def call(self, job: Sequence[Any]) -> Any:
        """Call a method of an episode's environment: the first one makes it, the last one forgets it."""
        episode, method, *arguments = job
        if method == RESET:
            self._open[episode] = self._timer.run(self._make)
        if method == STEP:
            arguments = [AssistantTurn(**arguments[0])]
        environment = self._open.pop(episode, None) if method == CLOSE else self._open[episode]
        code = getattr(environment, method, None)
        if code is None:
            return None  # without a close(), or one that was not made
        try:
            value = await self._run(code, arguments)
            return messages_of(value, RESET) if method == RESET else step_of(value) if method == STEP else None
        except BadReply as error:
            return {"bad_reply": str(error)}

    async def _run(self, code: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        if inspect.iscoroutinefunction(code):
            return await code(*arguments)
        value = self._timer.run(lambda: code(*arguments))
        return await value if inspect.isawaitable(value) else value


def _check_class(environment: Any, where: str, args: Mapping[str, Any]) -> None:
    """Raise Unfit if it is no class, lacks a method, or cannot be called as it will be."""
    if not inspect.isclass(environment):
        raise Unfit(f"{where} is {kind_of(environment)}, not a class with the methods reset and step")
    for method, parameters in METHODS.items():
        code = getattr(environment, method, None)
        if code is None and method == CLOSE:
            continue
        wanted = f"def {method}({', '.join(['self', *parameters])})"
        if not callable(code):
            raise Unfit(f"{where} has no method {method}: it needs {wanted}, async or not")
        is_bound = isinstance(inspect.getattr_static(environment, method), staticmethod | classmethod)
        _bind(code, [*([] if is_bound else [None]), *parameters], {}, f"{where}: {method}", f"it needs {wanted}")
    _bind(environment, [], args, f"{where}: its constructor", "it gets environment.args by name")


def _check_args(environment: Any, where: str, args: Mapping[str, Any], folder: str) -> None:
    """Let a class with a classmethod check_args look at the arguments. Raises: Unfit: it raises."""
    if isinstance(inspect.getattr_static(environment, CHECK, None), classmethod):
        try:
            environment.check_args(**args)
        except BaseException as error:
            raise Unfit(f"{where} refuses environment.args: {describe(error, folder)}") from error


def _bind(code: Callable[..., Any], values: Sequence[Any], named: Mapping[str, Any], where: str, needed: str) -> None:
    try:
        inspect.signature(code).bind(*values, **named)
    except TypeError as error:
        raise Unfit(f"{where}{inspect.signature(code)} does not fit: {error}; {needed}") from None
    except ValueError:  # of a class in C, which has no signature
        return
