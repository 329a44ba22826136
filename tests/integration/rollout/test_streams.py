"""The coordinator's dispatch over real SGLang: a replica that is killed costs a prefill, a long tail no barrier."""

import asyncio
import contextlib
import statistics
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.generate.dispatch import Rollouts
from rollout_service.engine import PART_TOKENS
from tandem_clients.flow import Completion, Generation, Order, Prompt, Sampling
from tandem_clients.replica import Replica as Client
from tests.fakes.fake_fleet import StaticFleet
from tests.kit.models import VOCABULARY, make_model
from tests.kit.replicas import Replica, lone_replica
from tests.kit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DEADLINE_S = 120.0
# Of what a replica that is killed generates half.
GROUPS, SIZE, TOKENS = 4, 2, 800
LONG_TAILS = "tests.integration.rollout.long_tails"


def prompts_of(number: int) -> dict[str, Prompt]:
    rows = {f"g{i}": [(7 * i + 3 * j) % (VOCABULARY - 6) + 5 for j in range(1 + i % 9)] for i in range(number)}
    return {name: Prompt(row=i, token_ids=array("I", ids), answer="") for i, (name, ids) in enumerate(rows.items())}


def order_of(num_completions: int, max_new_tokens: int, seed: int | None = None) -> Order:
    sampling = Sampling(temperature=1.0, max_new_tokens=max_new_tokens, stop_token_ids=())
    return Order(policy_version=0, num_completions=num_completions, sampling=sampling, seed=seed)


@contextlib.asynccontextmanager
async def rollouts_over(*replicas: Replica, max_groups_per_call: int = 1024) -> AsyncIterator[Rollouts]:
    clients = [Client(replica.name, replica.address) for replica in replicas]
    try:
        yield Rollouts(fleet=StaticFleet(clients), max_groups_per_call=max_groups_per_call, timeout_s=DEADLINE_S)
    finally:
        for client in clients:
            await client.close()


def completions(generation: Generation) -> list[Completion]:
    return [completion for group in generation.groups for completion in group.completions]


def test_a_replica_that_is_killed_costs_a_prefill(tmp_path: Path, module_redis: str) -> None:
    model = make_model(tmp_path / "model", max_position_embeddings=1024)
    folders = [tmp_path / name for name in ("dying", "other")]
    for folder in folders:
        folder.mkdir()
    kit = [lone_replica(folder, model, module_redis, serve_model=True) for folder in folders]
    prompts, order = prompts_of(GROUPS), order_of(SIZE, TOKENS, seed=9)
    parts = GROUPS * SIZE // 2
    try:
        dying, other = [replica.wait_up() for replica in kit]

        async def story() -> tuple[Generation, Generation, int]:
            async with rollouts_over(other) as alone:
                undisturbed = await alone.generate(prompts, order)
            before = other.status().generated_tokens
            async with rollouts_over(dying, other) as both:
                generating = asyncio.create_task(both.generate(prompts, order))
                # a part of each of its completions has come
                await asyncio.to_thread(until, lambda: dying.status().generated_tokens >= parts * PART_TOKENS, 60.0)
                # The service itself, so that its stream breaks; its engine ends with it.
                dying.process.kill()
                disturbed = await generating
            return undisturbed, disturbed, other.status().generated_tokens - before

        undisturbed, disturbed, sampled_by_other = asyncio.run(story())
    finally:
        for replica in kit:
            replica.close()
    assert disturbed.retried_calls > 0
    whole = completions(disturbed)
    assert [one.token_ids for one in whole] == [one.token_ids for one in completions(undisturbed)]
    assert (
        max(
            abs(a - b)
            for one, two in zip(whole, completions(undisturbed), strict=True)
            for a, b in zip(one.logprobs, two.logprobs, strict=True)
        )
        < 1e-3
    )
    # What the dead one had sent was not sampled again.
    kept = GROUPS * SIZE * TOKENS - sampled_by_other
    assert kept >= parts * PART_TOKENS * 0.9, kept
    print(f"kept {kept} of {parts * TOKENS} tokens of the replica that was killed")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_long_tail_is_no_barrier(tmp_path: Path, model: Path, module_redis: str) -> None:
    """384 completions with the lengths of long_tails.py, 128 at a time: continuous, and the same 128 by 128."""
    settings = {"serve_model": True, "max_total_tokens": 200_000, "max_running_requests": 128}
    kit = lone_replica(tmp_path, model, module_redis, None, LONG_TAILS, spawned=True, **settings)
    prompts = prompts_of(24)
    names = list(prompts)
    chunks = [{name: prompts[name] for name in names[first : first + 8]} for first in range(0, 24, 8)]

    async def speed(rollouts: Rollouts, parts: list[dict[str, Prompt]], seed: int) -> float:
        begun = time.perf_counter()
        tokens = sum([(await rollouts.generate(part, order_of(16, 450, seed))).num_tokens for part in parts])
        return tokens / (time.perf_counter() - begun)

    async def ratios() -> list[float]:
        async with rollouts_over(replica) as rollouts:
            await speed(rollouts, chunks, 0)  # warm
            return [await speed(rollouts, [prompts], i) / await speed(rollouts, chunks, i) for i in range(7)]

    try:
        replica = kit.wait_up()
        found = asyncio.run(ratios())
    finally:
        kit.close()
    print("continuous / barrier, tokens per s:", [round(ratio, 2) for ratio in found])
    assert statistics.median(found) > 1.2
