"""Wait for the first of several things to end, and end tasks; none started here is left running."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from servicekit.errors import Aborted
from servicekit.logs import get_logger

P = ParamSpec("P")
T = TypeVar("T")
Wait = asyncio.Event | Awaitable[Any]

# Name of the First that ended when nothing else did in time.
DEADLINE = "deadline"

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class First:
    """What ended first. name: its key, or DEADLINE; value: what it returned."""

    name: str
    value: Any = None


async def first_of(waits: Mapping[str, Wait], *, timeout_s: float | None = None) -> First:
    """Wait until the first of several things ends, and end those of the others that were begun here.

    | given            | ends when            | while another is first                          |
    |------------------|----------------------|-------------------------------------------------|
    | a coroutine      | it returns or fails  | is cancelled, and has ended when this returns   |
    | a task, a future | it is done           | continues: it is the caller's                   |
    | an event         | it is set            | stays as it is                                  |

    Of several that have ended, the one listed first counts; errors of the others begun here are logged.

    Args:
        timeout_s: after this long, return DEADLINE; None: wait for ever.
    Raises: the error of the first.
    """
    waiting = {name: _task_of(name, wait) for name, wait in waits.items()}
    ours = {name: task for name, task in waiting.items() if task is not waits[name]}
    first: str | None = None
    try:
        await asyncio.wait(waiting.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        first = next((name for name, task in waiting.items() if task.done()), None)
    finally:
        await cancel(*ours.values())
        for name, task in ours.items():
            if name != first and not task.cancelled() and (error := task.exception()) is not None:
                log.warning(
                    "task failed while another ended first", task=name, error=f"{type(error).__name__}: {error}"
                )
    return First(name=DEADLINE) if first is None else First(name=first, value=waiting[first].result())


def _task_of(name: str, wait: Wait) -> "asyncio.Future[Any]":
    if isinstance(wait, asyncio.Event):
        return asyncio.create_task(wait.wait(), name=name)
    return asyncio.ensure_future(wait)


async def all_of(*calls: Awaitable[T]) -> list[T]:
    """Wait for all calls. Returns: their results in order. Raises: the first error in order, after all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def end_of(task: "asyncio.Future[Any]") -> None:
    """Wait until a task of the caller is done, whatever its result."""
    await asyncio.wait([task])


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait until they have ended, whatever they end with.

    Raises: CancelledError: the caller was cancelled meanwhile; the tasks have ended then too.
    """
    cancelled: asyncio.CancelledError | None = None
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
            for task in running:
                task.cancel()
    for task in tasks:
        if not task.cancelled():
            task.exception()  # asyncio would log one that was never retrieved
    if cancelled is not None:
        raise cancelled


def failing(future: "asyncio.Future[None]") -> Callable[[str], None]:
    """Make a callback for other threads: its first call, with the reason, fails the future with Aborted."""
    loop = future.get_loop()

    def fail(error: Aborted) -> None:
        if not future.done():
            future.set_exception(error)
            future.exception()  # asyncio would log it if the process ends for another reason

    def report(why: str) -> None:
        loop.call_soon_threadsafe(fail, Aborted(why))

    return report


def to_its_end(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let a call run to its end when its caller gives up: half of it would leave an engine in an unknown state."""

    @functools.wraps(method)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(method(*args, **kwargs), name=method.__qualname__)
        # The caller gets its error; retrieve it here too, because the caller may have given up.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    return shielded
