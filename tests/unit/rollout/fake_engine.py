"""A deterministic RolloutEngine and its ranks: they do nothing but remember, and fail where a test says."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from rollout_service.engine import (
    EngineLimits,
    EngineLoad,
    Finish,
    GroupRequest,
    RolloutEngine,
    SampledCompletion,
    SampledGroup,
    SamplingSettings,
    Span,
)
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.fakes.fake_sync import FakeSync
from weightsync.round.phases import Phase, Role, name_of


async def generate_groups(
    engine: RolloutEngine, groups: Sequence[GroupRequest], sampling: SamplingSettings
) -> AsyncGenerator[list[SampledGroup], None]:
    """Whole groups of an engine, those that end together in one list; closing the iterator aborts what still runs."""
    found = defaultdict[str, list[SampledCompletion]](list)
    left = {group.group_id: len(group.starts()) for group in groups}
    with contextlib.closing(engine.open_stream(sampling)) as stream:
        await stream.submit(groups)
        async for news in stream.news():
            for completion in news:
                found[completion.group_id].append(completion)
            whole = [name for name, number in left.items() if len(found[name]) == number]
            if whole:
                yield [
                    SampledGroup(group_id=name, completions=sorted(found[name], key=lambda one: one.index))
                    for name in whole
                ]
            for name in whole:
                del left[name]
            if not left:
                return


class FakeEngine:
    """Answers token 1 at once; with `hold()`, waits until `release()` or an abort."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.limits = EngineLimits(vocab_size=100, longest_request=64, kv_tokens=1024)
        self.rank_addresses = [f"unix:rank{rank}" for rank in range(num_ranks)]
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []
        self.submitted: list[GroupRequest] = []
        self.version = 0
        self.ignores_aborts = False
        self._held: asyncio.Event | None = None
        self._aborted = False
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._retracted = False
        self.running: set[asyncio.Task[None]] = set()
        self.progress = 0

    def hold(self) -> None:
        self._held, self._aborted = asyncio.Event(), False

    def release(self) -> None:
        if self._held is not None:
            self._held.set()

    async def start(self) -> None:
        self.calls.append("start")

    def open_stream(self, sampling: SamplingSettings) -> "FakeStream":
        return FakeStream(self, sampling)

    async def before(self, group: GroupRequest) -> None:
        """Wait until a group may be answered."""
        if self._held is not None:
            await self._held.wait()
        await self._thawed.wait()

    def answer(self, group: GroupRequest, sampling: SamplingSettings, *, aborted: bool) -> list[SampledCompletion]:
        return [
            self._completion(group.group_id, index, 0 if aborted or self._aborted else num_tokens)
            for index, num_tokens in (
                (i, sampling.max_new_tokens - len(prefix)) for i, prefix in group.starts().items()
            )
        ]

    def _completion(self, group_id: str, index: int, num_tokens: int) -> SampledCompletion:
        return SampledCompletion(
            group_id=group_id,
            index=index,
            token_ids=[1] * num_tokens,
            logprobs=[-0.5] * num_tokens,
            finish=Finish.LENGTH if num_tokens else Finish.ABORT,
            spans=[Span(start=0, end=num_tokens, policy_version=self.version)],
        )

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self.running), waiting_requests=0, kv_cache_usage=0.0, progress=self.progress)

    async def freeze(self) -> None:
        self.calls.append("freeze")
        self._thawed.clear()

    async def retract(self) -> None:
        self.calls.append("retract")
        self._retracted = True

    async def thaw(self) -> None:
        self.calls.append("thaw")
        self._retracted = False
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
        return not self.running or self._retracted

    def cpu_s(self) -> tuple[float, ...]:
        return ()

    async def shutdown(self) -> None:
        self.calls.append("shutdown")


class FakeStream:
    """A task for each group."""

    def __init__(self, engine: FakeEngine, sampling: SamplingSettings) -> None:
        self._engine, self._sampling = engine, sampling
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news: asyncio.Queue[list[SampledCompletion]] = asyncio.Queue()

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        self._engine.submitted += groups
        for group in groups:
            task = self._tasks[group.group_id] = asyncio.create_task(self._run(group))
            self._engine.running.add(task)

    async def _run(self, group: GroupRequest) -> None:
        aborted = False
        try:
            await self._engine.before(group)
        except asyncio.CancelledError:
            aborted = True
        self._engine.running.discard(self._tasks[group.group_id])
        self._news.put_nowait(self._engine.answer(group, self._sampling, aborted=aborted))

    def cancel(self, group_id: str) -> None:
        if group_id in self._tasks:
            self._tasks[group_id].cancel()

    async def news(self, every_s: float | None = None) -> AsyncIterator[list[SampledCompletion]]:
        while True:
            news: list[SampledCompletion] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    news = await self._news.get()
            yield news

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()


class FakeRanks:
    """Keeps the order of a rank's phases; `fail_at` raises in that phase, `gate` holds every phase until it is set."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.num_ranks = num_ranks
        self.phases: list[str] = []
        self.fail_at: dict[int, Exception] = {}
        self.fail_load: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._sync = FakeSync(role=Role.RANK, name="rollout-0", num_ranks=num_ranks)

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
