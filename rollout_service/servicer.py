"""RolloutService: the wire edge. Requests become our data, our data becomes replies; decisions are made elsewhere."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from rollout_service.engine import Finish, RolloutEngine, SampledGroup
from rollout_service.metrics import RolloutMetrics
from rollout_service.open_stream import OpenStream
from rollout_service.sampling import read_sampling
from rollout_service.stall import SingleFlight
from rollout_service.weight_updates.admission import Admission
from rollout_service.weight_updates.ranks import Ranks
from rollout_service.weight_updates.updates import WeightUpdates
from servicekit.errors import InvalidRequest, WrongVersion
from servicekit.rpc.arrays import packed
from servicekit.rpc.fence import FenceGuard
from servicekit.versions import software_versions
from tandem_api.common.v1 import common_pb2
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_api.rollout.v1 import rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from weightsync.layouts.layout import Parallel
from weightsync.round.client import run_in_turn

# About 10 bytes a token on the wire: a reply stays below 10 MiB unless a single group is larger.
MAX_TOKENS_PER_REPLY = 1 << 20
# Between two looks at what is under way, and two reports of the load.
NEWS_S = 0.5
IDLE_POLL_S, QUIET_S = 0.05, 1.0
_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORT: pb.FINISH_REASON_ABORT,
}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer, weights_pb2_grpc.RoundServiceServicer):
    """RolloutService and RoundService of one replica.

    Args:
        max_groups: rollout.max_groups_per_call.
        parallel: parallel sizes of the replica's ranks.
        fence: knows the newest coordinator that the run has had; None: it had none.
        settings_digest: of the settings on which the run's services must agree.
    """

    def __init__(
        self,
        *,
        name: str,
        parallel: Parallel,
        max_groups: int,
        engine: RolloutEngine,
        ranks: Ranks,
        admission: Admission,
        updates: WeightUpdates,
        metrics: RolloutMetrics,
        fence: FenceGuard | None = None,
        settings_digest: str = "",
    ) -> None:
        self._name = name
        self._settings_digest = settings_digest
        self._parallel = parallel
        self._max_groups = max_groups
        self._engine = engine
        self._ranks = ranks
        self._admission = admission
        self._updates = updates
        self._metrics = metrics
        self._fence = FenceGuard() if fence is None else fence
        # In a thread: a scheduler that hangs while it reports its load blocks the reader.
        self.load = SingleFlight(lambda: asyncio.to_thread(engine.load))
        self.generated_tokens = 0
        self._leaving = False
        self._num_calls = 0
        self._ended_s = -math.inf  # the last call, or phase of a weight sync

    def leave(self) -> None:
        """Say from now on, on each stream, that we leave."""
        self._leaving = True

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until no call has sampled and no weight sync has needed us for QUIET_S; behind one a call may come.

        Returns: whether that came within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._num_calls or self._updates.is_in_round or time.monotonic() < self._ended_s + QUIET_S:
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(IDLE_POLL_S)
        return True

    async def TakeOver(self, request: pb.TakeOverRequest, context: Any) -> pb.TakeOverResponse:
        """End the round of an earlier coordinator and say which version is served."""
        await self._fence.admit_soon(request.fence)
        await self._updates.take_over()
        return pb.TakeOverResponse(policy_version=self._updates.policy_version)

    async def Generate(
        self, requests: AsyncIterator[pb.GenerateRequest], context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Sample what is submitted until the stream ends."""
        first = await anext(requests, None)
        if first is None:
            return
        sampling = read_sampling(first.sampling, self._engine.limits)
        stream = OpenStream(self._engine, sampling, self._admission, self._max_groups, self._until_it_serves)
        with self._observe_call(time.perf_counter()):
            async with stream.reading(first, requests):
                del first  # the stream decides how long it lives
                yield stream.response(await self._load())
                load_due_s, has_said = time.perf_counter() + NEWS_S, self._leaving
                async for news in self._admission.until_evicted(stream.news(NEWS_S)):
                    for part in _split(news):
                        self._count_tokens(part)
                        yield _fill(stream.response(), part)
                    if (now_s := time.perf_counter()) >= load_due_s or self._leaving > has_said:
                        load_due_s, has_said = now_s + NEWS_S, self._leaving
                        yield stream.response(await self._load())
                    if has_said and not stream.num_groups:
                        return

    async def _until_it_serves(self, request: pb.GenerateRequest) -> None:
        """Wait for the end of a pause. Raises: why what is submitted cannot be sampled."""
        await self._updates.until_it_generates()
        highest = request.max_policy_version if request.HasField("max_policy_version") else None
        self._check_version(request.min_policy_version, highest)

    def _check_version(self, lowest: int, highest: int | None) -> None:
        served = self._updates.policy_version
        if served < lowest or (highest is not None and served > highest):
            asked = (
                lowest if highest == lowest else f"{lowest} or newer" if highest is None else f"{lowest} to {highest}"
            )
            raise WrongVersion(f"asked for policy version {asked}, but {self._name} serves version {served}")

    async def _load(self) -> pb.ReplicaLoad:
        load = await self.load.within(NEWS_S)
        return pb.ReplicaLoad(
            running=0 if load is None else load.requests,
            waiting=0 if load is None else load.waiting_requests,
            kv_tokens=self._engine.limits.kv_tokens,
            policy_version=self._updates.policy_version,
            paused=self._updates.state == weights_pb2.REPLICA_STATE_PAUSED,
            leaving=self._leaving,
        )

    @contextlib.contextmanager
    def _observe_call(self, start_s: float) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._ended_s = time.monotonic()
            self._metrics.generate_seconds.observe(time.perf_counter() - start_s)

    def _count_tokens(self, groups: Sequence[SampledGroup]) -> None:
        tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
        self.generated_tokens += tokens
        self._metrics.generated_tokens.inc(tokens)

    async def RunPhase(self, request: weights_pb2.RunPhaseRequest, context: Any) -> weights_pb2.RunPhaseResponse:
        """Run one phase of a weight-sync round on this replica, or several in turn."""
        if request.phase == weights_pb2.ROUND_PHASE_UNSPECIFIED or not request.round.round_id:
            raise InvalidRequest("phase and round.round_id must be set")
        await self._fence.admit_soon(request.round.fence)
        try:
            return weights_pb2.RunPhaseResponse(reports=await run_in_turn(self._updates, request))
        finally:
            self._ended_s = time.monotonic()

    async def LoadPublishedWeights(
        self, request: pb.LoadPublishedWeightsRequest, context: Any
    ) -> pb.LoadPublishedWeightsResponse:
        """Load a version from the folder in which the trainer published it."""
        if not request.folder or not request.round_id:
            raise InvalidRequest("folder and round_id must be set")
        await self._fence.admit_soon(request.fence)
        published = weights_pb2.LoadPublishedRequest(
            folder=request.folder,
            policy_version=request.policy_version,
            round_id=request.round_id,
            fence=request.fence,
        )
        await self._updates.load_published(published)
        return pb.LoadPublishedWeightsResponse(state=self._updates.state)

    async def PauseGeneration(self, request: pb.PauseGenerationRequest, context: Any) -> pb.PauseGenerationResponse:
        """Stop generation at a token boundary."""
        await self._fence.admit_soon(request.fence)
        await self._updates.pause(request.mode)
        return pb.PauseGenerationResponse(state=self._updates.state)

    async def ResumeGeneration(self, request: pb.ResumeGenerationRequest, context: Any) -> pb.ResumeGenerationResponse:
        """Resume generation."""
        await self._fence.admit_soon(request.fence)
        await self._updates.resume()
        return pb.ResumeGenerationResponse(state=self._updates.state)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """State, served version and load of the replica."""
        load = await self.load()
        return pb.GetStatusResponse(
            name=self._name,
            state=self._updates.state,
            policy_version=self._updates.policy_version,
            running_groups=self._admission.running_groups,
            generated_tokens=self.generated_tokens,
            engine_progress=load.progress,
            parallel=self._parallel.to_proto(),
            versions=common_pb2.SoftwareVersions(packages=software_versions(("sglang", "torch", "transformers"))),
            settings_digest=self._settings_digest,
        )

    async def GetChecksums(self, request: pb.GetChecksumsRequest, context: Any) -> pb.GetChecksumsResponse:
        """Digest of every parameter of every rank."""
        checksums = await self._ranks.checksums()
        return pb.GetChecksumsResponse(ranks=[pb.RankChecksums(checksums=digests) for digests in checksums])


def _split(groups: Sequence[SampledGroup]) -> Iterator[list[SampledGroup]]:
    """Split into parts of at most MAX_TOKENS_PER_REPLY tokens, but of at least one group."""
    part: list[SampledGroup] = []
    tokens = 0
    for group in groups:
        size = sum(len(completion.token_ids) for completion in group.completions)
        if part and tokens + size > MAX_TOKENS_PER_REPLY:
            yield part
            part, tokens = [], 0
        part.append(group)
        tokens += size
    if part:
        yield part


def _fill(reply: pb.GenerateResponse, groups: Sequence[SampledGroup]) -> pb.GenerateResponse:
    """Fill a reply; messages are added in place, because a list of finished ones would be copied (twice the time)."""
    for group in groups:
        add = reply.groups.add(group_id=group.group_id).completions.add
        for completion in group.completions:
            message = add(
                token_ids_u32=packed("token_ids_u32", completion.token_ids),
                logprobs_f32=packed("logprobs_f32", completion.logprobs),
                finish_reason=_FINISH[completion.finish],
                cached_tokens=completion.cached_tokens,
                index=completion.index,
            )
            for span in completion.spans:
                message.version_spans.add(start=span.start, end=span.end, policy_version=span.policy_version)
    return reply
