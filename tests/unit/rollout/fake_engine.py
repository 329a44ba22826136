"""A deterministic RolloutEngine and its ranks: they do nothing but remember, and fail where a test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from rollout_service.engine import (
    EngineLimits,
    EngineLoad,
    Finish,
    FinishedGroup,
    GroupRequest,
    SampledCompletion,
    SamplingSettings,
    Span,
)
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.fakes.fake_sync import FakeSync
from weightsync.round.phases import Phase, Role, name_of


class FakeEngine:
    """Answers token 1 at once; with `hold()`, waits until `release()` or an abort."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.limits = EngineLimits(vocab_size=100, longest_request=64)
        self.rank_addresses = [f"unix:rank{rank}" for rank in range(num_ranks)]
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []
        self.version = 0
        self.ignores_aborts = False
        self._held: asyncio.Event | None = None
        self._aborted = False
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._inside = 0
        self.progress = 0

    def hold(self) -> None:
        self._held, self._aborted = asyncio.Event(), False

    def release(self) -> None:
        if self._held is not None:
            self._held.set()

    async def start(self) -> None:
        self.calls.append("start")

    async def generate(
        self, groups: Sequence[GroupRequest], sampling: SamplingSettings
    ) -> AsyncIterator[list[FinishedGroup]]:
        self._inside += 1
        try:
            if self._held is not None:
                await self._held.wait()
            await self._thawed.wait()
            for group in groups:
                yield [self._finished(group, sampling)]
        finally:
            self._inside -= 1

    def _finished(self, group: GroupRequest, sampling: SamplingSettings) -> FinishedGroup:
        tokens = [] if self._aborted else [1] * sampling.max_new_tokens
        completion = SampledCompletion(
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            finish=Finish.ABORT if self._aborted else Finish.LENGTH,
            spans=[Span(start=0, end=len(tokens), policy_version=self.version)],
            cached_tokens=0,
        )
        return FinishedGroup(group_id=group.group_id, completions=[completion] * group.num_completions)

    def load(self) -> EngineLoad:
        return EngineLoad(requests=self._inside, waiting_requests=0, kv_cache_usage=0.0, progress=self.progress)

    async def freeze(self) -> None:
        self.calls.append("freeze")
        self._thawed.clear()

    async def thaw(self) -> None:
        self.calls.append("thaw")
        self._thawed.set()

    async def abort_running(self) -> None:
        self.calls.append("abort_running")
        if not self.ignores_aborts:
            self._aborted = True
            self.release()

    async def begin_update(self) -> None:
        self.calls.append("begin_update")

    async def end_update(self) -> None:
        self.calls.append("end_update")

    async def set_version(self, policy_version: int) -> None:
        self.calls.append(f"set_version {policy_version}")
        self.version = policy_version

    async def flush_cache(self, timeout_s: float = 0.0) -> bool:
        self.calls.append("flush_cache")
        return self._inside == 0

    def cpu_s(self) -> tuple[float, ...]:
        return ()

    async def shutdown(self) -> None:
        self.calls.append("shutdown")


class FakeRanks:
    """Keeps the order of a rank's phases; `fail_at` raises in that phase, `gate` holds every phase until it is set."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.num_ranks = num_ranks
        self.phases: list[str] = []
        self.fail_at: dict[int, Exception] = {}
        self.fail_load: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._sync = FakeSync(role=Role.RANK, num_ranks=num_ranks)

    async def run_phase(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        self.phases.append(name_of(phase).upper())
        await self.gate.wait()
        if phase in self.fail_at:
            raise self.fail_at[phase]
        self._sync.run_phase(phase, round_)
        return [pb.PhaseReport(bytes_received=8, seconds={"transfer": 0.5}) for _ in range(self.num_ranks)]

    async def load_published(self, request: pb.LoadPublishedRequest) -> None:
        self.phases.append("LOAD")
        if self.fail_load is not None:
            raise self.fail_load

    async def checksums(self) -> list[dict[str, str]]:
        return [{"w": "float32:1:00"} for _ in range(self.num_ranks)]
