"""A worker process of an environment, or its replacements, and the turns of the calls that it does."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from coordinator.watch import metrics
from coordinator.workers.process import WorkerLost, WorkerProcess
from coordinator.workers.task import Answer, Task
from servicekit.logs import get_logger

# Calls at a time in a worker, if a method is `async def`; else one.
CONCURRENCY = 64
# The time that the episode has whose call waits for its turn.
LIMIT: ContextVar[asyncio.Timeout | None] = ContextVar("LIMIT", default=None)

log = get_logger(__name__)


class CallLost(Exception):
    """The worker of a call was lost. guilty: whether this call's code ran then; None: not known."""

    def __init__(self, lost: WorkerLost, *, guilty: bool | None) -> None:
        super().__init__(lost.why)
        self.answer, self.why, self.guilty = lost.answer, lost.why, guilty


@contextlib.contextmanager
def _not_counted() -> Iterator[None]:
    """Let the block, which is a wait for other episodes, take nothing of this one's time."""
    limit, now_s = LIMIT.get(), asyncio.get_running_loop().time
    due_s, begun_s = None if limit is None else limit.when(), now_s()
    if limit is None or due_s is None:
        yield
        return
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(due_s + now_s() - begun_s)


class WorkerSlot:
    """A worker process, or its replacements, and the turns of the calls that it does."""

    def __init__(self, task: Task) -> None:
        self.num_episodes = 0
        self._task = task
        self._running: RunningWorker | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        # Calls under way, and the most at a time; those that are to be the only one, begun ones too.
        self._calls, self._most, self._lonely = 0, 1, 0
        # Calls that wait, and those of them that are to be the only one.
        self._waiting, self._alone = deque[asyncio.Future[None]](), deque[asyncio.Future[None]]()

    async def ready(self) -> "RunningWorker":
        """Return the process; start one if it has ended. Raises: WorkerLost: it does not start."""
        async with self._starting:
            if self._closed:
                raise WorkerLost(Answer(error="the environment is closed"), "closed")
            if self._running is None or self._running.ended:
                if self._running is not None:
                    await self._running.settle()
                    log.warning("environment worker started again: the one before has ended")
                    metrics.ENVIRONMENT_RESTARTS.inc()
                self._running = RunningWorker(await WorkerProcess.start(self._task))
                self._most = CONCURRENCY if self._running.form["is_async"] else 1
                self._let_begin()
            return self._running

    @contextlib.asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a call's turn, or until it is the only one."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._alone if alone else self._waiting).append(future)
        self._lonely += alone
        try:
            self._let_begin()
            with _not_counted():
                await future
            yield
        finally:
            self._lonely -= alone
            self._calls -= future.done() and not future.cancelled()
            future.cancel()
            self._let_begin()

    def _let_begin(self) -> None:
        """Let calls that wait begin, first those that are to be the only one."""
        while waiting := self._alone if self._lonely else self._waiting:
            if self._calls >= (1 if self._lonely else self._most):
                return
            if not (future := waiting.popleft()).done():
                self._calls += 1
                future.set_result(None)

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        async with self._starting:
            if self._running is not None:
                await self._running.end()


class RunningWorker:
    """A process, and the calls that wait for its answers."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self.form = worker.form
        self._places = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._lost = False

    @property
    def ended(self) -> bool:
        """Whether it takes no more calls."""
        return self._lost or self._worker.ended

    async def call(self, job: Sequence[Any]) -> Answer:
        """Do a job; it ends if this is cancelled. Raises: CallLost."""
        if self._lost:
            raise CallLost(WorkerLost(Answer(error="its worker process was lost"), "lost"), guilty=False)
        place = next(self._places)
        self._worker.send([(place, job)])
        future = self._waiting[place] = asyncio.get_running_loop().create_future()
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="answers of an environment worker")
        try:
            answer: Answer = await future
            return answer
        except asyncio.CancelledError:
            if place in self._waiting and not self.ended:
                self._worker.send([(place, None)])
            raise

    async def end(self) -> None:
        """Kill the process; calls that wait are lost."""
        await self._worker.end()
        await self.settle()

    async def settle(self) -> None:
        """Wait until the calls of a process that has ended know it."""
        if self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading])
        else:
            await self._lose(WorkerLost(Answer(error="its worker process has ended"), "ended"))

    async def _read(self) -> None:
        try:
            while self._waiting:
                place, answer = await self._worker.answer()
                future = self._waiting.pop(place, None)
                if future is None:
                    raise ValueError("a call that it had answered before: has its code forked the process?")
                if not future.done():
                    future.set_result(answer)
        except (WorkerLost, ValueError) as error:  # ValueError: a line that is too long, no JSON, or unasked
            lost = error if isinstance(error, WorkerLost) else WorkerLost(Answer(error=f"answered {error}"), str(error))
            log.warning("environment worker lost", why=lost.why, pid=self._worker.pid, calls=len(self._waiting))
            await self._lose(lost)

    async def _lose(self, lost: WorkerLost) -> None:
        """Kill the process, if it has not ended, and say so to the calls that wait."""
        self._lost = True
        await self._worker.end()
        waiting, self._waiting = self._waiting, {}
        known = len(waiting) == 1 or self._worker.died_in in waiting
        for place, future in waiting.items():
            if not future.done():
                guilty = len(waiting) == 1 or place == self._worker.died_in
                future.set_exception(CallLost(lost, guilty=guilty if known else None))
