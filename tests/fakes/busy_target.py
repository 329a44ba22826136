"""The real servicers around work that takes its time, as a process: `python -m tests.fakes.busy_target NAME FOLDER`.

Prints its address, and serves until it is ended. Bounds that a machine of tests could not reach are lower.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servicekit.logs import configure_logging
from servicekit.rpc import limits
from servicekit.rpc.server import GrpcServer
from tests.fakes import hostile_target

# Seconds of a completion, a train step, a turn, an answer of the page.
ANSWER_S, STEP_S, TURN_S, PAGE_S = 1.0, 0.25, 0.05, 0.1
EPISODES = 64
ENVIRONMENT = f"""
import time

class Slow:
    def reset(self, row, seed):
        time.sleep({TURN_S})
        return []

    def step(self, turn):
        return {{"reward": 1.0, "done": True}}
"""


async def rollout() -> tuple[GrpcServer, str]:
    """RolloutService; each group takes its time, however many run."""
    from rollout_service import open_stream
    from rollout_service.weight_updates import admission
    from tests.unit.rollout.test_servicer import Served

    admission.MOST_TOKENS, open_stream._CACHES = 2**12, 0
    served = Served()
    before = served.engine.before

    async def slowly(group: Any) -> None:
        await asyncio.sleep(ANSWER_S)
        await before(group)

    served.engine.before = slowly  # type: ignore[method-assign]
    await served.start()
    return served.server, served.address


class SlowEngine(hostile_target.Engine):
    """A trainer's engine that trains one step at a time."""

    def train_step(self, *given: Any) -> Any:
        time.sleep(STEP_S)
        result = super().train_step(*given)
        self.policy_version -= 1  # so that each step of the test is as good as the first
        return result


async def environment(folder: Path, server: GrpcServer) -> None:
    """EnvironmentService, of a class with one worker."""
    from coordinator.environments.pool import EnvironmentPool
    from coordinator.environments.remote import SERVICE
    from environment_service.servicer import EnvironmentServicer
    from tandem_api.environment.v1 import environment_pb2_grpc
    from tandem_config.sections.environment import EnvironmentSection

    code = folder / "slow.py"
    code.write_text(ENVIRONMENT, encoding="utf-8")
    servicer = EnvironmentServicer(EnvironmentPool(EnvironmentSection(function=f"{code}:Slow", workers=1)), "slow")
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer, server._server)
    server._names.append(SERVICE)
    await servicer.load()


def page() -> str:
    """The page, whose answers of 64 KiB take their time in a thread."""
    from coordinator.web.server import DATA, PageServer

    def answer(query: Mapping[str, str]) -> dict[str, Any]:
        time.sleep(PAGE_S)
        return {"curves": [float(number) for number in range(2**13)]}

    return f"127.0.0.1:{PageServer('127.0.0.1', 0, {DATA: answer}).port}"


async def main() -> None:
    """Serves what the command line names."""
    configure_logging("busy-target")
    name, folder = sys.argv[1], Path(sys.argv[2])
    limits.MOST_CALLS_OF["Reset"] = EPISODES  # type: ignore[index]
    server = GrpcServer(name)
    if name == "rollout":
        server, address = await rollout()
    elif name == "page":
        address = page()
    else:
        if name == "environment":
            await environment(folder, server)
        else:
            hostile_target.Engine = SlowEngine  # type: ignore[misc]
            hostile_target.trainer(folder, server)
        address = await server.start()
    print(address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
