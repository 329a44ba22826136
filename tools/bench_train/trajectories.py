"""CPU time of the coordinator per trajectory, from the call to the serialized train step; engine and trainer are fake.

python -m tools.bench_train.trajectories [--tokens 256 2048] [--groups 64] [--completions 8] [--repeats 5]

A process serves Generate over gRPC on the loopback, with the rollout service's own replies. This process is the
coordinator: `SampleStream`, `select_samples`, `make_batch`, and the messages of `TrainStep` as bytes. Rewards and
texts, which depend on the run, are left out. The smallest of the repeats is what the code needs.
"""

import argparse
import asyncio
import multiprocessing
import time
from array import array
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from coordinator.learn.updates import make_batch, select_samples
from rollout_service.engine import PART_TOKENS, Finish, SampledCompletion, SampledGroup, Span
from rollout_service.servicer import _fill, _split
from servicekit.rpc.server import GrpcServer
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_clients.flow import Group, Order, Prompt, Sampling
from tandem_clients.replica import Replica
from tandem_clients.sample_stream import OpenGroup
from tandem_clients.trainer import step_requests

SERVICE = "tandem_api.rollout.v1.RolloutService"


class FakeReplica(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers each group with completions of `max_new_tokens` tokens, in parts as the real service does."""

    async def Generate(
        self, requests: AsyncIterator[rollout_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Answer all groups, in the messages of the real service."""
        tokens = (await anext(requests)).sampling.max_new_tokens
        async for request in requests:
            for first in range(0, tokens, PART_TOKENS):
                size = min(PART_TOKENS, tokens - first)
                finish = Finish.LENGTH if first + size == tokens else None
                for part in _split([_group(group, size, finish) for group in request.groups]):
                    yield _fill(rollout_pb2.GenerateResponse(), part)


def _group(group: rollout_pb2.PromptGroup, tokens: int, finish: Finish | None) -> SampledGroup:
    completions = [
        SampledCompletion(
            group_id=group.group_id,
            index=index,
            token_ids=list(range(100_000, 100_000 + tokens)),
            logprobs=[-0.125] * tokens,
            finish=finish,
            spans=[Span(start=0, end=tokens, policy_version=1)],
        )
        for index in range(group.num_completions)
    ]
    return SampledGroup(group_id=group.group_id, completions=completions)


def serve(ready: Connection) -> None:
    """Serve until the other end is closed."""

    async def run() -> None:
        server = GrpcServer("rollout")
        server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, FakeReplica(), SERVICE)  # type: ignore[abstract]
        ready.send(await server.start())
        await asyncio.to_thread(ready.poll, None)

    asyncio.run(run())


async def sample(replica: Replica, prompts: dict[str, Prompt], order: Order) -> list[Group]:
    """Ask for all groups, and return them."""
    groups: list[Group] = []
    async with replica.sampling(order, timeout_s=60.0) as stream:
        number = order.num_completions
        asked = [OpenGroup(group_id=name, prompt=prompts[name], num_completions=number) for name in prompts]
        await stream.submit([(group, group.take(number)) for group in asked])
        async for news in stream.news():
            groups += [group.group() for group in news.whole]
            if len(groups) == len(prompts):
                break
    return groups


async def measure(address: str, args: argparse.Namespace, tokens: int) -> tuple[float, float]:
    """Return the CPU seconds of calls with their replies, and of a train step's messages, per trajectory."""
    sampling = Sampling(temperature=1.0, max_new_tokens=tokens, stop_token_ids=())
    order = Order(policy_version=1, num_completions=args.completions, sampling=sampling)
    prompts = {f"g{i}": Prompt(row=i, token_ids=array("I", range(100, 356)), answer="") for i in range(args.groups)}
    replica = Replica("rollout-0", address)
    number = args.groups * args.completions
    calls, steps = [], []
    for _ in range(args.repeats + 1):
        begun = time.process_time()
        groups = await sample(replica, prompts, order)
        received = time.process_time()
        samples = select_samples(
            groups, np.zeros((args.groups, args.completions)), np.zeros(args.groups, np.bool_), truncated="keep"
        )
        rng = np.random.default_rng(0)
        batch = make_batch(samples, step_id="s", policy_version=1, num_updates=1, rng=rng)
        size = sum(len(request.SerializeToString()) for request in step_requests(batch))
        steps.append((time.process_time() - received) / number)
        calls.append((received - begun) / number)
        assert size > number * tokens * 7
    await replica.close()
    return min(calls[1:]), min(steps[1:])


def main() -> None:
    """Measure, and print a line for each length."""
    parser = argparse.ArgumentParser(description="CPU time of the coordinator per trajectory")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    for name, default in (("--groups", 64), ("--completions", 8), ("--repeats", 5)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    address = here.recv()
    for tokens in args.tokens:
        call, step = asyncio.run(measure(address, args, tokens))
        print(
            f"{tokens:6d} tokens: {call * 1e6:6.1f} us call and reply, {step * 1e6:6.1f} us train step, "
            f"{(call + step) * 1e6:6.1f} us together"
        )
    here.close()
    process.terminate()
    process.join(timeout=10)


if __name__ == "__main__":
    main()
