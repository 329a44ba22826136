"""A coordinator of the chaos tests: one publication by the real code, then the end."""

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coordinator.sync.weight_sync import WeightSync
from coordinator.take_over import take_over
from servicekit.environment import ServiceEnvironment
from servicekit.errors import TandemError
from servicekit.lifecycle.tasks import cancel
from servicekit.lifecycle.termination import run_main
from servicekit.redis.registry import Registry
from tandem_clients.trainer import Trainer
from tandem_clients.watched_fleet import WatchedFleet
from tandem_config.schema import RunConfig
from tandem_files.atomic import write_bytes_atomic
from tests.chaos.members import begin, leave
from tests.kit.waiting import until
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import Rendezvous

SEEDING_S = 40.0


def main(settings: dict[str, Any]) -> None:
    """One publication, then the end: the result, or the error, goes into the file settings["result"]."""
    config, environment = begin(settings)

    async def conduct(stop: asyncio.Event) -> int:
        result = Path(settings["result"])
        work = asyncio.create_task(_publish(config, environment, settings))
        try:
            _say(result, {"result": await work})
        except TandemError as error:
            _say(result, {"error": str(error), "reason": error.reason})
            return 1
        return 0

    leave(run_main("coordinator", conduct))


def _say(file: Path, said: dict[str, Any]) -> None:
    write_bytes_atomic(file, json.dumps(said).encode(), durable=False)


async def _let_replicas_seed(sync: WeightSync, fleet: WatchedFleet, wanted: list[str]) -> None:
    """Let replicas seed others, until these serve and are all that is announced."""
    seeding, deadline_s = asyncio.create_task(sync.run_seeding()), time.monotonic() + SEEDING_S
    while time.monotonic() < deadline_s:
        names = sorted(each.name for each in await fleet.look())
        if names == wanted == sorted(each.name for each in fleet.serving()):
            break
        await asyncio.sleep(0.05)
    await cancel(seeding)


async def _publish(config: RunConfig, environment: ServiceEnvironment, settings: dict[str, Any]) -> dict[str, Any]:
    registry = await asyncio.to_thread(Registry, environment.redis_url, environment.run_id)
    group = await asyncio.to_thread(Rendezvous, environment.redis_url, f"tandem:{environment.run_id}")
    lead = CoordinatorLease(group, config.sync.lease_ttl_s)
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(lead.claim, 3 * config.sync.lease_ttl_s)
        stack.push_async_callback(asyncio.to_thread, lead.close)
        records = await asyncio.to_thread(registry.wait_for, "trainer", ["trainer"], config.sync.formation_timeout_s)
        client = Trainer(records[0].address, fence=lead.fence)
        stack.push_async_callback(client.close)
        fleet = WatchedFleet(registry, client)
        stack.push_async_callback(fleet.close)
        fleet.admit([each for each in await fleet.look() if each.name in settings["serving"]])
        sync = WeightSync(
            trainer=client,
            fleet=fleet,
            group=group,
            settings=config.sync,
            lead=lead,
            disk_folder=settings["disk_folder"],
        )
        version = int(settings["policy_version"])
        if settings["checkpoint"]:
            version = await take_over(client, sync, version, Path(settings["checkpoint"]))
        if settings["serving"]:
            result = await sync.seed_late_joiners(version)
        else:
            result = await sync.publish(version)
        if settings["seed_when"]:
            # The same coordinator goes on: replicas that have come since are seeded once the test says so.
            _say(Path(settings["result"] + ".first"), {"serving": sorted(each.name for each in fleet.serving())})
            await asyncio.to_thread(until, Path(settings["seed_when"]).exists, 60.0)
            if settings["replicas_seed"]:
                await _let_replicas_seed(sync, fleet, settings["replicas_seed"])
            else:
                result = await sync.seed_late_joiners(version)
        said = {} if result is None else asdict(result)
        said["outcomes"] = {name: outcome.name for name, outcome in said.get("outcomes", {}).items()}
        return {**said, "serving": sorted(each.name for each in fleet.serving())}
