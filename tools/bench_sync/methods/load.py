"""Keeps engines busy during a round with short completions, and records when each of them came."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from servicekit.lifecycle.tasks import end_of, first_of
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tools.bench_sync.methods.session import CALL_S, Session
from tools.bench_sync.whole_groups import prompt_group, submission

GROUPS = 1000  # more than an engine finishes in a round, fewer than rollout.max_groups_per_call
NEW_TOKENS = 2  # completions come often, so that a silence shows
FIRST_S = 60.0


@dataclass
class Progress:
    """Times of every completion (time.perf_counter()), by replica."""

    finished_s: list[list[float]] = field(default_factory=list)

    def longest_silence_s(self) -> float:
        """Return the longest time in which a replica finished no completion, until now."""
        now_s = time.perf_counter()
        return max(max(self._gaps([*times_s, now_s])) for times_s in self.finished_s)

    def typical_silence_s(self) -> float:
        """Return the median time between two completions of the slowest replica."""
        return max(median(self._gaps(times_s)) for times_s in self.finished_s)

    def _gaps(self, times_s: list[float]) -> list[float]:
        return [b - a for a, b in itertools.pairwise(times_s)] or [0.0]


@contextlib.asynccontextmanager
async def generating(session: Session) -> AsyncIterator[Progress]:
    """Keep every replica generating inside a `with` block, which starts when all have finished completions."""
    progress = Progress([[] for _ in session.replicas])
    begun = [asyncio.Event() for _ in session.replicas]
    tasks = [
        asyncio.create_task(_generate(stub, times_s, event), name="load")
        for stub, times_s, event in zip(session.replicas, progress.finished_s, begun, strict=True)
    ]
    try:
        async with asyncio.timeout(FIRST_S):
            for task, event in zip(tasks, begun, strict=True):
                await first_of({"load": end_of(task), "begun": event})
        _check(tasks)
        yield progress
        _check(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError(f"an engine finished {GROUPS} completions before the round ended")


async def _generate(stub: rollout_pb2_grpc.RolloutServiceStub, times_s: list[float], begun: asyncio.Event) -> None:
    status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=10.0)
    groups = [prompt_group(str(i), [i % 97, 1, 2, 3]) for i in range(GROUPS)]
    request = submission(groups, status.policy_version, max_new_tokens=NEW_TOKENS)
    async for response in stub.Generate(iter([request]), timeout=CALL_S):
        if any(completion.finish_reason for group in response.groups for completion in group.completions):
            times_s.append(time.perf_counter())
        if len(times_s) > 2:
            begun.set()
