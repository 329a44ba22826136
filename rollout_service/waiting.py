"""Waits for one thing while others may end it."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, None], *ends: "asyncio.Future[None]") -> bool:
    """Runs `work`, and gives it up when `stop` is set or one of `ends` is done first.

    Returns: whether the work was done. Raises: its error, or that of the end that came first.
    """
    working = asyncio.create_task(work, name="work")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    waits: set[asyncio.Future[Any]] = {working, stopped, *ends}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    for end in ends:
        if end.done():
            end.result()
            return False
    if working.cancelled():
        return False
    working.result()
    return True


P = ParamSpec("P")
T = TypeVar("T")


def to_its_end(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Goes on when its caller gives up: half of it would leave the engine in a state that nobody knows of."""

    @functools.wraps(method)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(method(*args, **kwargs), name=method.__qualname__)
        # Its error is its caller's to hear; there may be none any more.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    return shielded
