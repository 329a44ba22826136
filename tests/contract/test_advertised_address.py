"""What a service announces is where others reach it, not where it listens."""

import asyncio

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig

DEADLINE_S = 20.0


async def test_the_coordinator_announces_its_advertised_host(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    environment = environment.model_copy(update={"advertise_host": "localhost"})
    stop = asyncio.Event()
    run = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
    registry = Registry(environment.redis_url, environment.run_id)
    (record,) = await asyncio.to_thread(registry.wait_for, "coordinator", ["coordinator"], DEADLINE_S)
    stop.set()
    assert await asyncio.wait_for(run, DEADLINE_S) == 0
    registry.close()
    assert record.address.startswith("localhost:")
    assert record.metrics_address.startswith("localhost:")
