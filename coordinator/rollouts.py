"""Step 2: prompts to groups of completions, spread over the rollout replicas.

Prompts are cut into balanced chunks, one call per replica at a time. A call that fails gives its unfinished groups
back; they go to the replica that has failed least. A replica gets no more work after `MAX_FAILURES` failed calls of a
dispatch, and when none is left the dispatch fails, naming every replica's last error.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from coordinator.completions import MalformedReply, read_group
from coordinator.fleet.base import Fleet
from coordinator.probing import while_alive
from coordinator.replica import Replica
from coordinator.samples import Generation, Group, Prompt
from servicekit.errors import InvalidRequest, TandemError, TooLarge, Unavailable
from servicekit.logs import get_logger
from tandem_api.rollout.v1 import rollout_pb2

# One failed call is forgiven, a second is a pattern: a replica that fails all calls costs a dispatch two of them.
MAX_FAILURES = 2

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are sampled."""

    # 0 is greedy.
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]

    def to_proto(self) -> rollout_pb2.SamplingParams:
        """The wire form, without top-p and top-k: the trainer's log-probs are of the full distribution."""
        return rollout_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=1.0,
            top_k=-1,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a dispatch is asked for, beside the prompts."""

    policy_version: int
    num_completions: int
    sampling: Sampling


class Rollouts:
    """The rollout replicas as one.

    Args:
        fleet: those of it that serve get work.
        max_groups_per_call: most groups that a replica accepts in one call.
        timeout_s: deadline of one call.
        probe_timeout_s: a replica that does not say how it is for so long loses its call.
    """

    def __init__(
        self, fleet: Fleet, *, max_groups_per_call: int, timeout_s: float, probe_timeout_s: float = 10.0
    ) -> None:
        self._fleet = fleet
        self._max_groups_per_call = max_groups_per_call
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s

    async def generate(self, prompts: Mapping[str, Prompt], order: Order) -> Generation:
        """Sample `order.num_completions` completions for each prompt.

        Args:
            prompts: prompts by group id.
        Returns: groups in the prompts' order.
        Raises:
            InvalidRequest, TooLarge: a replica refuses the request; repeating it would not help.
            Unavailable: every replica failed; each is named with its last error. Or none serves.
        """
        replicas = self._fleet.serving()
        if not replicas:
            raise Unavailable("no replica serves the current policy")
        # Balanced: as many equal chunks as whole rounds over the replicas need.
        num_chunks = max(len(replicas), -(-len(prompts) // self._max_groups_per_call))
        size = max(1, -(-len(prompts) // num_chunks))
        ids = list(prompts)
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        dispatch = _Dispatch(self._fleet, prompts, order, self._timeout_s, self._probe_timeout_s)
        return await dispatch.run(chunks)


class _Dispatch:
    """One order on its way: what is asked of whom, what has come back, what failed where."""

    def __init__(
        self,
        fleet: Fleet,
        prompts: Mapping[str, Prompt],
        order: Order,
        timeout_s: float,
        probe_timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._replicas = fleet.serving()
        self._prompts = prompts
        self._order = order
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s
        self._sampling = order.sampling.to_proto()
        self._groups: dict[str, Group] = {}
        self._engine_s = {replica.name: 0.0 for replica in self._replicas}
        self._failures: Counter[str] = Counter()
        self._errors: dict[str, TandemError] = {}
        self._running: dict[asyncio.Task[list[str]], Replica] = {}

    async def run(self, chunks: Sequence[list[str]]) -> Generation:
        """Hand chunks out until every group is there."""
        pending = deque(chunks)
        try:
            while pending or self._running:
                self._start_calls(pending)
                if not self._running:
                    raise self._exhausted()
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del self._running[task]
                    if unfinished := task.result():
                        pending.appendleft(unfinished)
        finally:
            await self._cancel_calls()
        return Generation(
            groups=tuple(self._groups[group_id] for group_id in self._prompts),
            engine_s=max(self._engine_s.values()),
            retried_calls=self._failures.total(),
        )

    def _start_calls(self, pending: deque[list[str]]) -> None:
        """Give every replica without a call a chunk, those that have failed least first.

        One that has begun to leave meanwhile finishes its call and gets no other.
        """
        busy, staying = set(self._running.values()), set(self._fleet.serving())
        here = [replica for replica in self._replicas if replica in staying]
        for replica in sorted(here, key=lambda replica: self._failures[replica.name]):
            if pending and replica not in busy and self._failures[replica.name] < MAX_FAILURES:
                task = asyncio.create_task(self._call(replica, pending.popleft()), name=f"generate-{replica.name}")
                self._running[task] = replica

    async def _call(self, replica: Replica, group_ids: Sequence[str]) -> list[str]:
        """Ask one replica for groups. Returns: those that it did not deliver."""
        error: TandemError | None = None
        try:
            await while_alive(self._receive(replica, group_ids), replica, probe_timeout_s=self._probe_timeout_s)
        except (InvalidRequest, TooLarge):
            raise
        except TandemError as failure:
            error = failure
        unfinished = [group_id for group_id in group_ids if group_id not in self._groups]
        if unfinished and error is None:
            error = Unavailable(f"{replica.name}: left {len(unfinished)} of {len(group_ids)} groups unfinished")
        if error is not None:
            self._failures[replica.name] += 1
            self._errors[replica.name] = error
            log.warning("generate call failed", replica=replica.name, unfinished=len(unfinished), error=str(error))
        return unfinished

    async def _receive(self, replica: Replica, group_ids: Sequence[str]) -> None:
        responses = replica.generate(self._request(group_ids), timeout_s=self._timeout_s)
        before_s = self._engine_s[replica.name]
        async with aclosing(responses):
            async for response in responses:
                self._engine_s[replica.name] = before_s + response.engine_s
                for result in response.groups:
                    self._keep(replica, result)

    def _keep(self, replica: Replica, result: rollout_pb2.GroupResult) -> None:
        if result.group_id not in self._prompts:
            raise MalformedReply(f"{replica.name}: sent group {result.group_id!r}, which was not asked for")
        prompt = self._prompts[result.group_id]
        group = read_group(result, prompt, self._order.num_completions, source=replica.name)
        # None: aborted by a pause or a shutdown; it stays unfinished and is asked for again.
        if group is not None:
            self._groups[result.group_id] = group

    def _request(self, group_ids: Sequence[str]) -> rollout_pb2.GenerateGroupsRequest:
        groups = [
            rollout_pb2.PromptGroup(
                group_id=group_id,
                prompt_ids=self._prompts[group_id].token_ids,
                num_completions=self._order.num_completions,
            )
            for group_id in group_ids
        ]
        return rollout_pb2.GenerateGroupsRequest(
            groups=groups, sampling=self._sampling, policy_version=self._order.policy_version
        )

    def _exhausted(self) -> Unavailable:
        missing = len(self._prompts) - len(self._groups)
        left = "{}: left the fleet".format
        told = "; ".join(str(self._errors.get(replica.name, left(replica.name))) for replica in self._replicas)
        return Unavailable(
            f"{missing} of {len(self._prompts)} groups could not be generated, every replica failed: {told}"
        )

    async def _cancel_calls(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
