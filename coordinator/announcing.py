"""How a coordinator tells the run where it is."""

import asyncio
import contextlib
import time

from servicekit.errors import AlreadyExists
from servicekit.registry import Registry, ServiceRecord

# Seconds without a heartbeat after which watchers take the coordinator for dead.
LEASE_TTL_S = 15.0
RETRY_S = 0.2


async def announce(registry: Registry, record: ServiceRecord, stop: asyncio.Event) -> None:
    """Announce us, once the lease of a predecessor that was killed has run out; or return when `stop` is set.

    Raises: AlreadyExists: another coordinator lives; Unavailable: Redis does not answer.
    """
    deadline_s = time.monotonic() + 2 * LEASE_TTL_S
    while not stop.is_set():
        try:
            await asyncio.to_thread(registry.announce, record, LEASE_TTL_S)
            return
        except AlreadyExists:
            if time.monotonic() >= deadline_s:
                raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await stop.wait()
