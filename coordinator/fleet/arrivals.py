"""Waits until enough services of a run are announced, and notes those that are, for its page.

How long is enough depends on who starts the services: an `Outlook` knows.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from coordinator.watch.fleet_recorder import FleetRecorder
from servicekit.errors import DeadlineExceeded, TandemError
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tandem_clients.fleet import LOOK_INTERVAL_S
from tandem_config.schema import RunConfig

# Enough for a page that asks every two seconds.
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class AnnouncedServices:
    """The services that are announced."""

    trainers: list[ServiceRecord]
    rollouts: list[ServiceRecord]


class Outlook(Protocol):
    """What is known of services that are not announced."""

    def update(self, announced: AnnouncedServices) -> None:
        """Find out what takes a while to find out; called in a thread before the questions."""
        ...

    def may_come(self, announced: AnnouncedServices) -> bool:
        """Whether to wait for further replicas, although rollout.min_replicas and the trainer are announced."""
        return True

    def patience_s(self, announced: AnnouncedServices) -> float:
        """Return for how long to wait for services that are needed, in seconds from the start of the wait.

        Raises: Unavailable: they cannot come.
        """
        ...

    def troubles(self, announced: AnnouncedServices) -> list[str]:
        """Return why they may be missing."""
        ...


class LeaseOutlook(Outlook):
    """Of services of which nothing is known but that they are announced, or not."""

    def __init__(self, config: RunConfig, registry: Registry) -> None:
        self._config, self._registry = config, registry

    def update(self, announced: AnnouncedServices) -> None:
        """Nothing: there is no one to ask."""

    def patience_s(self, announced: AnnouncedServices) -> float:
        """Return run.startup_timeout_s."""
        return self._config.run.startup_timeout_s

    def troubles(self, announced: AnnouncedServices) -> list[str]:
        """Return the failures that services have recorded."""
        return [str(failure) for failure in self._registry.failures()]


async def wait_for_enough(
    config: RunConfig, registry: Registry, outlook: Outlook, wanted: Callable[[], int], *, others_s: float = math.inf
) -> ServiceRecord:
    """Wait until the trainer and rollout.min_replicas are announced, and for the others as long as they may come.

    For the others at most until run.startup_timeout_s; the run finds later ones when they come.

    Args:
        wanted: returns how many replicas there should be now.
        others_s: how long to wait for the others at most, from the moment that enough are announced.
    Returns: the trainer's record.
    Raises:
        DeadlineExceeded: with the services that are announced, and the outlook's troubles.
        Unavailable: as the outlook says.
    """
    start_s, enough_s = time.monotonic(), math.inf
    while True:
        announced = await asyncio.to_thread(_read, registry)
        await asyncio.to_thread(outlook.update, announced)
        waited_s = time.monotonic() - start_s
        num_replicas = len(announced.rollouts)
        if announced.trainers and num_replicas >= config.rollout.min_replicas:
            enough_s = min(enough_s, waited_s)
            is_late = waited_s >= min(config.run.startup_timeout_s, enough_s + others_s)
            if is_late or num_replicas >= wanted() or not outlook.may_come(announced):
                return announced.trainers[0]
        elif waited_s >= (timeout_s := outlook.patience_s(announced)):
            names = ", ".join(record.name for record in [*announced.trainers, *announced.rollouts]) or "none"
            needed = f"the trainer and {config.rollout.min_replicas} replicas (rollout.min_replicas)"
            missed = f"waited {timeout_s:g} s for {needed}; announced: {names}"
            raise DeadlineExceeded("; ".join([missed, *outlook.troubles(announced)]))
        await asyncio.sleep(LOOK_INTERVAL_S)


async def note_arrivals(
    config: RunConfig,
    registry: Registry,
    observed: FleetRecorder,
    is_starting: Callable[[], bool],
    wanted: Callable[[], int],
) -> None:
    """Look at the registry until all services of the run are announced, or the run has started without them."""
    start_s = time.monotonic()
    while is_starting():
        try:
            announced = await asyncio.to_thread(_read, registry)
        except TandemError:  # whoever needs the registry says that it is unreachable
            await asyncio.sleep(_LOOK_S)
            continue
        for record in [*announced.trainers, *announced.rollouts]:
            observed.arrived.setdefault(record.name, time.monotonic() - start_s)
        replicas = [record.name for record in announced.rollouts]
        observed.awaited = missing(config, wanted(), len(announced.trainers), replicas)
        if not observed.awaited:
            return
        await asyncio.sleep(_LOOK_S)
    observed.awaited = []


def missing(config: RunConfig, wanted: int, num_trainers: int, replicas: list[str]) -> list[str]:
    """Name the services that are not announced; of a cluster, which names the replicas, their number."""
    awaited = [] if num_trainers else ["trainer"]
    if config.fleet.kind == "kubernetes":
        more = wanted - len(replicas)
        return awaited + ([f"{more} more replicas"] if more > 0 else [])
    names = (f"rollout-{index}" for index in range(wanted))
    return awaited + [name for name in names if name not in replicas]


def _read(registry: Registry) -> AnnouncedServices:
    return AnnouncedServices(trainers=registry.list("trainer"), rollouts=registry.list("rollout"))
