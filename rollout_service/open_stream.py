"""One Generate call: what is submitted goes to the engine, what is new comes back, the groups that run are counted."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from rollout_service.engine import GroupRequest, RolloutEngine, SampledCompletion, SampledGroup, SamplingSettings
from rollout_service.sampling import read_groups
from rollout_service.weight_updates.admission import Admission
from servicekit.lifecycle.tasks import cancel
from tandem_api.rollout.v1 import rollout_pb2 as pb

# What a completion takes besides its tokens; and a run's requests at a replica, all its streams together, as a multiple
# of the KV cache: a stream submits what fits into it, twice that if nothing waits.
_COMPLETION_TOKENS, _CACHES = 64, 8


class OpenStream:
    """The groups of one call.

    Args:
        max_groups: most that one message may submit (rollout.max_groups_per_call).
        until_it_serves: waits until what a request submits can be sampled; raises if it cannot.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingSettings,
        admission: Admission,
        max_groups: int,
        until_it_serves: Callable[[pb.GenerateRequest], Awaitable[None]],
    ) -> None:
        self._limits, self._sampling = engine.limits, sampling
        self._stream = engine.open_stream(sampling)
        self._admission, self._max_groups, self._until_it_serves = admission, max_groups, until_it_serves
        self._left: dict[str, set[int]] = {}  # by group, the completions that have not ended
        self._tokens: Counter[str] = Counter()  # by group
        self._prompts: dict[str, bytes] = {}  # those that are kept, by group
        self._num_accepted = 0  # groups that the engine has taken
        self._began_s: float | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def num_groups(self) -> int:
        """Number of groups that run."""
        return len(self._left)

    def response(self, load: pb.ReplicaLoad | None = None) -> pb.GenerateResponse:
        """Return a response with what the stream has accepted, and the time that it has taken."""
        engine_s = 0.0 if self._began_s is None else time.perf_counter() - self._began_s
        return pb.GenerateResponse(load=load, engine_s=engine_s, accepted=self._num_accepted)

    @asynccontextmanager
    async def reading(
        self, first: pb.GenerateRequest, requests: AsyncIterator[pb.GenerateRequest]
    ) -> AsyncIterator[None]:
        """Read and submit inside the block; at its end what runs is aborted."""
        self._reading = asyncio.create_task(self._read(first, requests), name="read-submissions")
        del first
        try:
            yield
        finally:
            await cancel(self._reading)
            self._reading = None  # its error holds its frame, which holds this stream
            self._stream.close()
            kept = sum(map(_tokens_in, self._prompts.values()))
            self._admission.leave(len(self._left), self._tokens.total() + kept)

    async def _read(self, request: pb.GenerateRequest | None, requests: AsyncIterator[pb.GenerateRequest]) -> None:
        while request is not None:
            for group_id in request.cancel:
                if group_id in self._left:
                    self._stream.cancel(group_id)
                self._admission.leave(0, _tokens_in(self._prompts.pop(group_id, b"")))
            if request.groups:
                for message in request.groups:
                    message.prompt_ids_u32 = message.prompt_ids_u32 or self._prompts.get(message.group_id, b"")
                groups = read_groups(request.groups, self._sampling, self._limits, self._max_groups, self._left)
                await self._until_it_serves(request)
                tokens = {group.group_id: _tokens_of(group) for group in groups}
                keep = {one.group_id: one.prompt_ids_u32 for one in request.groups if one.keeps_prompt}
                keep = {name: prompt for name, prompt in keep.items() if name not in self._prompts}
                held = sum(tokens.values()) + sum(map(_tokens_in, keep.values()))
                self._admission.enter(len(tokens.keys() - self._left), held, _CACHES * self._limits.kv_tokens)
                self._tokens.update(tokens)
                self._prompts |= keep
                for group in groups:
                    self._left.setdefault(group.group_id, set()).update(group.starts())
                self._began_s = self._began_s or time.perf_counter()
                await self._stream.submit(groups)
                self._num_accepted += len(groups)
            del request
            request = await anext(requests, None)

    async def news(self, every_s: float) -> AsyncIterator[list[SampledGroup]]:
        """Yield what is new, by group, at least every so often; until all is read and has ended.

        Raises: what reading raises; RuntimeError: the engine failed a request.
        """
        async for completions in self._stream.news(every_s):
            yield self._by_group(completions)
            if self._reading is not None and self._reading.done():
                self._reading.result()
                if not self._left:
                    return

    def _by_group(self, completions: Sequence[SampledCompletion]) -> list[SampledGroup]:
        groups: dict[str, list[SampledCompletion]] = {}
        for completion in completions:
            groups.setdefault(completion.group_id, []).append(completion)
        for name, found in groups.items():
            self._left[name].difference_update(one.index for one in found if one.finish is not None)
            if not self._left[name]:
                del self._left[name]
                self._admission.leave(1, self._tokens.pop(name))
        return [SampledGroup(group_id=name, completions=found) for name, found in groups.items()]


def _tokens_in(prompt_ids_u32: bytes) -> int:
    return len(prompt_ids_u32) // 4


def _tokens_of(group: GroupRequest) -> int:
    """Return the tokens that a request holds."""
    starts = group.starts()
    own = sum(map(len, group.prompts.values())) + sum(map(len, starts.values()))
    return len(group.prompt_ids) + own + _COMPLETION_TOKENS * len(starts)
