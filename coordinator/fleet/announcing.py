"""How a coordinator tells the run where it is."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from servicekit.errors import AlreadyExists, Unavailable
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry

RETRY_S = 0.2


async def announce(
    registry: Registry,
    record: ServiceRecord,
    ttl_s: float,
    stop: asyncio.Event,
    on_lost: Callable[[str], None] | None = None,
) -> None:
    """Announce us, once the lease of a predecessor that was killed has run out; or return when `stop` is set.

    Args:
        ttl_s: seconds without a heartbeat after which watchers take the coordinator for dead.
        on_lost: called from another thread, with a sentence, when another coordinator has taken our place.
    Raises: AlreadyExists: another coordinator lives; Unavailable: Redis does not answer for as long.
    """
    deadline_s = time.monotonic() + 2 * ttl_s
    while not stop.is_set():
        try:
            await asyncio.to_thread(registry.announce, record, ttl_s, on_lost)
            return
        except (AlreadyExists, Unavailable):
            if time.monotonic() >= deadline_s:
                raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await stop.wait()
