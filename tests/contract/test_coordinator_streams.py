"""256 replicas and 100,000 completions under way: the event loop keeps answering, and memory is what tokens need."""

import asyncio
import multiprocessing
import time
from array import array
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from coordinator.generate.dispatch import Rollouts
from servicekit.rpc.arrays import packed
from servicekit.rpc.server import GrpcServer
from tandem_api.common.v1 import common_pb2
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_api.rollout.v1 import rollout_pb2_grpc
from tandem_clients.flow import Generation, Order, Prompt, Sampling
from tandem_clients.replica import Replica
from tests.fakes.fake_fleet import StaticFleet

REPLICAS, GROUPS, GROUP_SIZE, PARTS, TOKENS = 256, 6_400, 16, 4, 128
PART_S = 6.0  # between the parts of a completion
SAMPLES = GROUPS * GROUP_SIZE
DISPATCHES = 10  # a million samples
NAME = "tandem_api.rollout.v1.RolloutService"


class Parts(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers groups with all of their completions, part by part, one group a message."""

    async def Generate(
        self, requests: AsyncIterator[pb.GenerateRequest], context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(load=pb.ReplicaLoad())
        async for request in requests:
            for number in range(PARTS if request.groups else 0):
                begun = time.monotonic()
                for position, group in enumerate(request.groups):
                    result = pb.GroupResult(group_id=group.group_id, completions=_completions(number == PARTS - 1))
                    yield pb.GenerateResponse(groups=[result])
                    ahead = begun + PART_S * (position + 1) / len(request.groups) - time.monotonic()
                    await asyncio.sleep(max(0.0, ahead))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(name="rollout-0")


def _completions(last: bool) -> list[pb.Completion]:
    return _MADE.setdefault(last, [_completion(index, last) for index in range(GROUP_SIZE)])


def _completion(index: int, last: bool) -> pb.Completion:
    return pb.Completion(
        index=index,
        token_ids_u32=packed("token_ids_u32", range(TOKENS)),
        logprobs_f32=packed("logprobs_f32", [-0.5] * TOKENS),
        finish_reason=pb.FINISH_REASON_LENGTH if last else pb.FINISH_REASON_UNSPECIFIED,
        version_spans=[common_pb2.VersionSpan(start=0, end=TOKENS, policy_version=1)],
    )


_MADE: dict[bool, list[pb.Completion]] = {}


def serve(ready: Connection) -> None:
    """A process that serves until the other end is closed."""

    async def run() -> None:
        server = GrpcServer("rollout")
        server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, Parts(), NAME)  # type: ignore[abstract]
        ready.send(await server.start())
        await asyncio.to_thread(ready.poll, None)

    asyncio.run(run())


async def lags_of(work: "asyncio.Task[Generation]") -> list[float]:
    """How much later than asked a sleep of 10 ms ended, again and again while the work runs."""
    lags: list[float] = []
    while not work.done():
        begun = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(time.perf_counter() - begun - 0.01)
    return sorted(lags)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
async def test_256_replicas_and_100_000_completions_under_way() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    address = await asyncio.to_thread(here.recv)
    replicas = [Replica(f"rollout-{index}", address) for index in range(REPLICAS)]
    rollouts = Rollouts(fleet=StaticFleet(replicas), max_groups_per_call=1024, timeout_s=300.0)
    sampling = Sampling(temperature=1.0, max_new_tokens=PARTS * TOKENS, stop_token_ids=())
    order = Order(policy_version=1, num_completions=GROUP_SIZE, sampling=sampling)
    prompts = {f"g{i}": Prompt(row=i, token_ids=array("I", range(64)), answer="") for i in range(GROUPS)}
    rss, p99, held = [], [], 0.0
    try:
        await asyncio.gather(*(replica.status() for replica in replicas))  # opens the connections
        for _ in range(DISPATCHES):
            before = psutil.Process().memory_info().rss
            work = asyncio.create_task(rollouts.generate(prompts, order))
            lags = await lags_of(work)
            generation = work.result()
            assert generation.num_tokens == SAMPLES * PARTS * TOKENS
            held = max(held, (psutil.Process().memory_info().rss - before) / generation.num_tokens)
            del generation, work
            rss.append(psutil.Process().memory_info().rss >> 20)
            p99.append(lags[int(0.99 * len(lags))])
    finally:
        for replica in replicas:
            await replica.close()
        here.close()
        process.terminate()
        process.join(10)
    print(f"p99 of the lag {[round(1e3 * lag) for lag in p99]} ms, bytes per token {held:.1f}, MiB between {rss}")
    assert held <= 12
    assert rss[-1] <= 1.1 * rss[1]
