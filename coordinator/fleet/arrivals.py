"""Notes which services have announced themselves while a run starts, so that its page says which are awaited."""

import asyncio
import time
from collections.abc import Callable

from coordinator.watch.observed import Observed
from servicekit.errors import TandemError
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig

# Enough for a page that asks every two seconds.
_LOOK_S = 0.5


async def note_arrivals(
    config: RunConfig, registry: Registry, observed: Observed, is_starting: Callable[[], bool]
) -> None:
    """Look at the registry until all services of the run are announced, or the run has started without them."""
    start_s = time.monotonic()
    while is_starting():
        try:
            trainers, rollouts = await asyncio.to_thread(lambda: (registry.list("trainer"), registry.list("rollout")))
        except TandemError:  # whoever needs the registry says that it is unreachable
            await asyncio.sleep(_LOOK_S)
            continue
        present = [record.name for record in [*trainers, *rollouts]]
        for name in present:
            observed.arrived.setdefault(name, time.monotonic() - start_s)
        observed.awaited = missing(config, len(trainers), [record.name for record in rollouts])
        if not observed.awaited:
            return
        await asyncio.sleep(_LOOK_S)
    observed.awaited = []


def missing(config: RunConfig, num_trainers: int, replicas: list[str]) -> list[str]:
    """Name the services that are not announced; of a cluster, which names the replicas, their number."""
    awaited = [] if num_trainers else ["trainer"]
    if config.fleet.kind == "kubernetes":
        more = config.rollout.replicas - len(replicas)
        return awaited + ([f"{more} more replicas"] if more > 0 else [])
    names = (f"rollout-{index}" for index in range(config.rollout.replicas))
    return awaited + [name for name in names if name not in replicas]
