"""Announces this process in the registry, whatever a killed predecessor has left there."""

import asyncio

from servicekit.errors import AlreadyExists, Unavailable
from servicekit.registry import Registry, ServiceRecord

ANNOUNCE_RETRY_S = 0.25


async def announce(registry: Registry, record: ServiceRecord, ttl_s: float) -> "asyncio.Future[None]":
    """Announces the record, once the lease of a predecessor that was killed has run out and Redis answers.

    Returns: a future that fails when another process has taken the name.
    Raises: AlreadyExists: another process has it and lives; Unavailable: Redis does not answer for as long.
    """
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()

    def on_lost(sentence: str) -> None:
        loop.call_soon_threadsafe(lost.set_exception, RuntimeError(sentence))

    deadline_s = loop.time() + 2 * ttl_s
    while True:
        try:
            await asyncio.to_thread(registry.announce, record, ttl_s, on_lost)
            return lost
        except (AlreadyExists, Unavailable):
            if loop.time() >= deadline_s:
                raise
        await asyncio.sleep(ANNOUNCE_RETRY_S)
