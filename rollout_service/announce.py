"""Announces this process in the registry, whatever a killed predecessor has left there."""

import asyncio

from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry


async def announce(registry: Registry, record: ServiceRecord, ttl_s: float) -> "asyncio.Future[None]":
    """Announces the record, under the name of a predecessor that was killed, and once Redis answers.

    Returns: a future that fails when another process has taken the name.
    Raises: AlreadyExists: another process has it and lives; Unavailable: Redis does not answer for as long.
    """
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()

    def on_lost(sentence: str) -> None:
        loop.call_soon_threadsafe(lost.set_exception, RuntimeError(sentence))

    await asyncio.to_thread(registry.announce_when_free, record, ttl_s, on_lost)
    return lost
