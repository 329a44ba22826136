"""Takes a snapshot of the run on its event loop, between the run's steps, for a thread that asks."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from servicekit.errors import Unavailable

# A snapshot takes milliseconds; a loop that has not taken one by then is stuck.
SNAPSHOT_S = 5.0


def on_loop(
    snapshot: Callable[[], dict[str, Any]], loop: asyncio.AbstractEventLoop
) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """Make the page's answer from `snapshot`, which is called on `loop`.

    Returns: an answer that raises Unavailable if the loop is stuck, or has ended.
    """

    async def take() -> dict[str, Any]:
        return snapshot()

    def answer(query: Mapping[str, str]) -> dict[str, Any]:
        del query
        try:
            return asyncio.run_coroutine_threadsafe(take(), loop).result(SNAPSHOT_S)
        except (TimeoutError, RuntimeError) as error:
            raise Unavailable(f"the coordinator does not answer: {error or type(error).__name__}") from error

    return answer
