"""A replica whose engine is a formula: the seconds of a step that gives each row a token."""

import asyncio
import heapq
import math
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from servicekit.lifecycle.tasks import Wait, cancel, first_of
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_clients.flow import Completion, Order
from tandem_clients.sample_stream import News, OpenGroup, SampleStream

# Between two reports of the load, as of the real service.
NEWS_S = 0.5


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """How long an engine's step takes.

    Attributes:
        step_s, row_s, kv_s: seconds of a step, and what each row adds, and each token in the KV cache of the rows.
        prefill_s: seconds of a step in which rows begin, and none gets a token.
    """

    step_s: float
    row_s: float
    kv_s: float = 0.0
    prefill_s: float = 0.0

    def seconds(self, steps: float, rows: int, tokens: float) -> float:
        """Return how long so many steps take, which add to the tokens."""
        return steps * (self.step_s + self.row_s * rows + self.kv_s * (tokens + rows * steps / 2))

    def steps(self, seconds: float, rows: int, tokens: float) -> float:
        """Return the steps that so many seconds are enough for: `seconds` the other way round."""
        first_s = self.step_s + self.row_s * rows + self.kv_s * tokens
        return 2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * self.kv_s * rows * seconds))


@dataclass(order=True, slots=True)
class _Job:
    """A completion: it ends when the engine has made `ends` steps for whatever runs."""

    ends: float
    number: int
    length: int = field(compare=False)
    index: int = field(compare=False)
    group: OpenGroup = field(compare=False)
    stream: "_Stream" = field(compare=False)


@dataclass(kw_only=True, eq=False)
class SimulatedReplica:
    """A replica.

    Attributes:
        slots: completions that run at a time; others wait.
        kv_tokens: that its KV cache takes.
        speed: of its engine.
        length_of: tokens of a completion, by the group's id and its index.
        busy_row_s: seconds that rows have run, all together.
        flips: (steps done, version) of each change of the policy.
    """

    name: str
    slots: int
    kv_tokens: int
    speed: EngineSpeed
    length_of: Callable[[str, int], int]
    busy_row_s: float = 0.0
    flips: list[tuple[float, int]] = field(default_factory=list)
    cut: tuple[float | None, int] = (None, 0)
    _steps: float = 0.0
    _tokens: float = 0.0
    _prefill_s: float = 0.0
    _looked_s: float = 0.0
    _is_paused: bool = False
    _running: list[_Job] = field(default_factory=list)
    _waiting: deque[_Job] = field(default_factory=deque)
    _number: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _work: "asyncio.Task[None] | None" = None

    @asynccontextmanager
    async def sampling(self, order: Order, *, timeout_s: float, newer: bool = False) -> AsyncIterator[SampleStream]:
        """As tandem_clients.replica.Replica."""
        self.working()
        stream = _Stream(self, order)
        yield stream
        self._running = [job for job in self._running if job.stream is not stream]
        self._tokens = sum(self._steps - job.ends + job.length for job in self._running)
        heapq.heapify(self._running)

    def working(self) -> "asyncio.Task[None]":
        """Return the engine's task, which ends with an error only."""
        if self._work is None:
            self._work = asyncio.create_task(self._run(), name=self.name)
        return self._work

    async def status(self, *, timeout_s: float) -> object:
        """It is there."""
        return self

    def load(self) -> pb.ReplicaLoad:
        """Return what the real one reports."""
        waiting = len(self._waiting)
        return pb.ReplicaLoad(running=len(self._running), waiting=waiting, kv_tokens=self.kv_tokens)

    def submit(self, stream: "_Stream", group: OpenGroup, index: int) -> None:
        """Let a completion run when there is room."""
        self._number += 1
        length = self.length_of(group.group_id, index)
        self._waiting.append(_Job(0.0, self._number, length, index, group, stream))
        self._changed.set()

    def flip(self, version: int) -> None:
        """Sample with another policy from now on."""
        self.advance()
        self.flips.append((self._steps, version))

    def pause(self, paused: bool) -> None:
        """Stop, or continue."""
        self.advance()
        self._is_paused = paused
        self._changed.set()

    async def close(self) -> None:
        """End it."""
        if self._work is not None:
            await cancel(self._work)

    def advance(self) -> None:
        """Do the steps that were possible since the last look."""
        now_s = asyncio.get_running_loop().time()
        if self._running and not self._is_paused:
            left_s, rows = now_s - self._looked_s, len(self._running)
            self.busy_row_s += left_s * rows
            prefill_s = min(left_s, self._prefill_s)
            self._prefill_s -= prefill_s
            steps = self.speed.steps(left_s - prefill_s, rows, self._tokens)
            self._steps += steps
            self._tokens += steps * rows
        self._looked_s = now_s

    async def _run(self) -> None:
        while True:
            self.advance()
            while self._running and self._running[0].ends <= self._steps + 1e-6:
                self._end(heapq.heappop(self._running))
            if self._waiting and len(self._running) < self.slots:
                self._prefill_s += self.speed.prefill_s
            while self._waiting and len(self._running) < self.slots:
                job = self._waiting.popleft()
                job.ends = math.ceil(self._steps - 1e-6) + job.length  # it begins with the next step
                heapq.heappush(self._running, job)
            self._changed.clear()
            timeout_s = None
            if self._running and not self._is_paused:
                steps = self._running[0].ends - self._steps
                timeout_s = self._prefill_s + self.speed.seconds(steps, len(self._running), self._tokens)
            await first_of({"changed": self._changed}, timeout_s=timeout_s)

    def _end(self, job: _Job) -> None:
        first = job.ends - job.length
        self._tokens -= job.length
        spans: list[tuple[int, int]] = []
        for at, version in self.flips:
            begin = min(max(0, round(at - first)), job.length)
            spans = [(min(end, begin), before) for end, before in spans]
            spans = [span for place, span in enumerate(spans) if span[0] > (spans[place - 1][0] if place else 0)]
            if begin < job.length:
                spans.append((job.length, version))
        job.group.found[job.index] = Completion(
            token_ids=array("I", bytes(4 * job.length)),
            logprobs=array("f", bytes(4 * job.length)),
            truncated=False,
            oldest_version=min(version for _, version in spans),
            version_spans=tuple(spans),
        )
        job.group.running.discard(job.index)
        job.stream.ended(job.group)


class _Stream(SampleStream):
    """A stream without messages."""

    def __init__(self, replica: SimulatedReplica, order: Order) -> None:
        super().__init__(replica.name, None, order, math.inf)
        self._replica = replica
        self._ended: list[OpenGroup] = []
        self._news = asyncio.Event()

    async def submit(self, parts: Sequence[tuple[OpenGroup, Sequence[int]]]) -> None:
        for group, indices in parts:
            for index in indices:
                self._replica.submit(self, group, index)

    def ended(self, group: OpenGroup) -> None:
        self._ended.append(group)
        self._news.set()

    async def news(self) -> AsyncIterator[News]:
        load: pb.ReplicaLoad | None = self._replica.load()
        loop = asyncio.get_running_loop()
        due_s = loop.time() + NEWS_S
        while True:
            self._news.clear()
            ended, self._ended = self._ended, []
            self.read_s = loop.time()
            whole = list(dict.fromkeys(group for group in ended if group.is_whole()))
            yield News(whole=whole, aborted=[], num_ended=len(ended), engine_s=0.0, load=load)
            waits: dict[str, Wait] = {"news": self._news, "engine": self._replica.working()}
            await first_of(waits, timeout_s=max(0.0, due_s - loop.time()))
            load = None
            if loop.time() >= due_s - 1e-6:  # a timer may be early by the resolution of the clock
                load, due_s = self._replica.load(), loop.time() + NEWS_S
