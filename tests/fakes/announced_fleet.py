"""A fake fleet that the registry and the weight group know; as a module, a process of its own until SIGTERM.

`python -m tests.fakes.announced_fleet REDIS_URL RUN_ID`: so that measurements of the coordinator exclude the services.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from servicekit.life.lifecycle import run_main
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.security.certificates import CA, CERT, KEY, TlsFiles
from tests.fakes.fake_fleet import FakeFleet, fake_fleet
from tests.fakes.fake_trainer import FakeTrainer
from weightsync.group.rendezvous import Rendezvous, SlotLease

SLOTS = ("trainer/0", "trainer/1", "rollout-0/0", "rollout-1/0")
_TTL_S = 60.0


@asynccontextmanager
async def announced_fleet(
    redis_url: str,
    run_id: str,
    trainer: FakeTrainer | None = None,
    tls: TlsFiles | None = None,
    ttl_s: float = _TTL_S,
) -> AsyncIterator[FakeFleet]:
    """Trainer TP 2 and two replicas, announced."""
    group = Rendezvous(redis_url, f"tandem:{run_id}")
    async with fake_fleet(trainer=trainer, tls=tls) as fleet:
        leases = [SlotLease(group, slot, ttl_s) for slot in SLOTS]
        registries = {name: Registry(redis_url, run_id) for name in fleet.addresses}
        fleet.registries |= registries
        for lease in leases:
            lease.start()
        for name, address in fleet.addresses.items():
            record = ServiceRecord(role=name.partition("-")[0], name=name, address=address, worker_id=name)
            registries[name].announce(record, ttl_s)
        try:
            yield fleet
        finally:
            for registry in registries.values():
                await asyncio.to_thread(registry.close)
            for lease in leases:
                await asyncio.to_thread(lease.close)


async def _serve(stop: asyncio.Event) -> None:
    tls = TlsFiles.of(*(os.environ.get(name, "") for name in (CERT, KEY, CA)))
    async with announced_fleet(sys.argv[1], sys.argv[2], tls=tls):
        await stop.wait()


if __name__ == "__main__":
    sys.exit(run_main("fleet", _serve))
