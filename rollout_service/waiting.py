"""Waits for one thing while others may end it."""

import asyncio
from collections.abc import Coroutine
from typing import Any


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
