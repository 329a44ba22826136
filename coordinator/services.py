"""The services that a run needs: found in the registry, reached over channels, asked for their versions."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from coordinator.fleet.base import Fleet
from coordinator.fleet.watched import WatchedFleet
from coordinator.summary import merge_versions
from coordinator.trainer import Trainer
from servicekit.registry import Registry
from tandem_config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Services:
    """Clients of the run's services."""

    trainer: Trainer
    fleet: Fleet

    async def versions(self) -> dict[str, str]:
        """Software versions of all services."""
        found = {self.trainer.name: dict((await self.trainer.status()).versions.packages)}
        for replica in await self.fleet.look():
            found[replica.name] = dict((await replica.status()).versions.packages)
        return merge_versions(found)


async def find_services(config: RunConfig, registry: Registry, stack: AsyncExitStack) -> Services:
    """Wait until trainer and replicas have announced themselves, and open channels to them.

    Raises: DeadlineExceeded: naming who is missing after run.startup_timeout_s.
    """
    names = [f"rollout-{index}" for index in range(config.rollout.replicas)]
    timeout_s = config.run.startup_timeout_s
    (trainer_record,), _ = await asyncio.gather(
        asyncio.to_thread(registry.wait_for, "trainer", ["trainer"], timeout_s),
        asyncio.to_thread(registry.wait_for, "rollout", names, timeout_s),
    )
    trainer = Trainer(trainer_record.address)
    stack.push_async_callback(trainer.close)
    fleet = WatchedFleet(registry, trainer)
    stack.push_async_callback(fleet.close)
    return Services(trainer=trainer, fleet=fleet)
