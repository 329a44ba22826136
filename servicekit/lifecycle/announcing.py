"""Announce a process in the registry, also where killed processes have left their records."""

import asyncio
import time
from collections.abc import Callable

from servicekit.errors import AlreadyExists, ConfigurationSkew, Unavailable
from servicekit.lifecycle.tasks import first_of
from servicekit.logs import get_logger
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry

RETRY_S = 0.25

log = get_logger(__name__)


async def announce(
    registry: Registry, record: ServiceRecord, ttl_s: float, stop: asyncio.Event, on_lost: Callable[[str], None]
) -> bool:
    """Announce the record: immediately if the predecessor refuses connections, else when its lease has run out.

    Services with another configuration get as much time to go, because those that end now are announced for a while.

    Args:
        ttl_s: seconds that the record outlives this process.
        on_lost: called once, from another thread, with the reason, when another process has taken the name.
    Returns: whether it is announced; False: `stop` was set first.
    Raises: AlreadyExists: another process has the name, and renews its lease; Unavailable: Redis has not answered for
        two leases; ReleaseSkew: a service of the run is of another release; ConfigurationSkew: one has read another
        configuration, and stays.
    """
    deadline_s = time.monotonic() + 2 * ttl_s
    logged = False
    while not stop.is_set():
        try:
            await asyncio.to_thread(_take_name, registry, record, ttl_s, on_lost)
            return True
        except (AlreadyExists, ConfigurationSkew, Unavailable) as error:
            if time.monotonic() >= deadline_s:
                raise
            if not logged and isinstance(error, ConfigurationSkew):
                log.warning("waiting for services with another configuration to end", error=str(error))
            elif not logged:
                log.info("service not announced: waiting for its name", name=record.name, why=str(error))
            logged = True
        await first_of({"stop": stop}, timeout_s=RETRY_S)
    return False


def _take_name(registry: Registry, record: ServiceRecord, ttl_s: float, on_lost: Callable[[str], None]) -> None:
    try:
        registry.announce(record, ttl_s, on_lost)
    except AlreadyExists:
        if not registry.remove_refusing(record.role, record.name):
            raise
        registry.announce(record, ttl_s, on_lost)
