"""What the coordinator itself costs at the demo's size: processor time, with the services in another process."""

import asyncio
import sys
import time

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import with_settings
from tests.fakes.tiny_task import write_data

# Of an iteration of 300-400 ms at this size, of which Tandem may add 15 %. Seen: 20 ms, RPCs included.
LIMIT_S = 0.040
FEW, MANY = 3, 23


async def cpu_s_of(config: RunConfig, environment: ServiceEnvironment, iterations: int) -> float:
    """Processor seconds of this process for a whole run."""
    folder = environment.run_dir / str(iterations)
    folder.mkdir()
    own = environment.model_copy(update={"run_dir": folder, "run_id": f"t{iterations}"})
    config = with_settings(config, run={"iterations": iterations})
    command = [sys.executable, "-m", "tests.fakes.announced_fleet", own.redis_url, own.run_id]
    fleet = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        start_s = time.process_time()
        assert await conduct(config, own, resume=False, stop=asyncio.Event()) == 0
        return time.process_time() - start_s
    finally:
        fleet.terminate()
        await asyncio.wait_for(fleet.wait(), 20)


async def test_an_iteration_of_64_groups_of_16_costs_little(config: RunConfig, environment: ServiceEnvironment) -> None:
    problems = [(a, b) for a in range(10, 100) for b in range(10, 60)]
    config = with_settings(
        config,
        run={"checkpoint_every": 100, "evaluate_every": 100, "startup_timeout_s": 60},
        grpo={"prompts_per_iteration": 64, "group_size": 16, "updates_per_iteration": 4},
        data={"train": write_data(environment.run_dir / "train.jsonl", problems), "heldout": None},
    )
    few, many = [await cpu_s_of(config, environment, count) for count in (FEW, MANY)]
    assert (many - few) / (MANY - FEW) < LIMIT_S
