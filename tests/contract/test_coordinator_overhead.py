"""What the coordinator itself does at the demo's size, with the services in another process.

Counted in function calls, not in seconds: a busy neighbour more than doubles processor time (20 ms an iteration on a
quiet core, 49 ms at load 6), and the count is the same on both.
"""

import asyncio
import cProfile
import sys

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import with_settings
from tests.kit.folders import write_data

FEW, MANY = 3, 23
GROUPS, GROUP_SIZE = 64, 16
# Seen: 66.8 to 70.1 calls for a completion, by itself more than in a whole suite; one of them is of the weight sync and
# the page. One more call for each of its tokens, which are three or more, would pass the limit.
LIMIT = 72


async def calls_of(config: RunConfig, environment: ServiceEnvironment, iterations: int) -> int:
    """Function calls of this process's event loop in a whole run."""
    folder = environment.run_dir / str(iterations)
    folder.mkdir()
    own = environment.model_copy(update={"run_dir": folder, "run_id": f"t{iterations}"})
    config = with_settings(config, run={"iterations": iterations})
    command = [sys.executable, "-m", "tests.fakes.fake_fleet", own.redis_url, own.run_id]
    fleet = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        with cProfile.Profile() as profile:
            assert await conduct(config, own, resume=False, stop=asyncio.Event()) == 0
        return sum(entry.callcount for entry in profile.getstats())
    finally:
        fleet.terminate()
        await asyncio.wait_for(fleet.wait(), 20)


async def test_an_iteration_of_64_groups_of_16_costs_little(config: RunConfig, environment: ServiceEnvironment) -> None:
    problems = [(a, b) for a in range(10, 100) for b in range(10, 60)]
    config = with_settings(
        config,
        run={"checkpoint_every": 100, "evaluate_every": 100, "startup_timeout_s": 60},
        grpo={"prompts_per_iteration": GROUPS, "group_size": GROUP_SIZE, "updates_per_iteration": 4},
        data={"train": write_data(environment.run_dir / "train.jsonl", problems), "heldout": None},
    )
    found: list[float] = []
    # On a busy machine completions come in more messages (68.2 seen): the smaller of two counts is what the code needs.
    while len(found) < 2 and (not found or found[0] >= LIMIT):
        own = environment.model_copy(update={"run_dir": environment.run_dir / f"try{len(found)}"})
        own.run_dir.mkdir()
        few, many = [await calls_of(config, own, count) for count in (FEW, MANY)]
        found.append((many - few) / (MANY - FEW) / (GROUPS * GROUP_SIZE))
    assert min(found) < LIMIT
