"""Episodes of a user's environment, in worker processes that each hold many of them.

An episode stays with its worker. When that is lost, each of its episodes is built again in the next process before its
next call: constructor, reset, and the turns so far, whose replies must be the same. The call whose code ran when the
worker was lost fails. If that is not known, each of those that were under way is tried alone, and fails if it is again.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from coordinator.watch import metrics
from coordinator.workers.episodes.replies import AssistantTurn, Message
from coordinator.workers.episodes.serving import CLOSE, RESET, STEP
from coordinator.workers.own_code import read_source
from coordinator.workers.process import WorkerLost, WorkerProcess
from coordinator.workers.task import Answer, Task
from coordinator.workers.tasks import ENVIRONMENT
from servicekit.logs import get_logger
from tandem_config.sections.environment import EnvironmentSection
from tandem_config.sections.reward import split_reference

Call = TypeVar("Call")
FailureKind = Literal["late", "error", "killed", "not_repeatable", "bad_reply"]

# Calls at a time in a worker, if a method is `async def`; else one.
CONCURRENCY = 64
# Times that an episode is built again for a call that may have lost its worker. The call that is known to have lost it
# is not tried again. The others need no bound: each loss ends one of the episodes that cause them.
MAX_REPLAYS = 2
_SHOWN_CHARS = 200

log = get_logger(__name__)


class EpisodeFailed(Exception):
    """An episode cannot continue; the others can.

    Attributes:
        kind: late, error (it raised), killed (its process ended), not_repeatable (after another one's process had
            ended), bad_reply (it returned what it must not).
    """

    def __init__(self, key: str, kind: FailureKind, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.kind, self.text = kind, text


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReply:
    """What follows a turn, one of the first three, or the end.

    Attributes:
        messages: behind the turn.
        token_ids: behind the turn, as they are.
        conversation: all that the next turn follows, in place of what was said.
        reward: None: this turn has none.
    """

    messages: Sequence[Message] = ()
    token_ids: Sequence[int] = ()
    conversation: Sequence[Message] = ()
    reward: float | None
    done: bool

    @classmethod
    def of(cls, value: Sequence[Any]) -> "TurnReply":
        """Make it of what replies.step_of returns."""
        follows, reward, done = value
        return cls(**follows if isinstance(follows, dict) else {"messages": follows}, reward=reward, done=done)


def row_of(
    *, prompt: str, messages: Sequence[Mapping[str, Any]] | None, answer: str, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a row of the data as `reset` gets it; a prompt that is a text is a message too."""
    given = [{"role": "user", "content": prompt}] if messages is None else [dict(message) for message in messages]
    return {"prompt": prompt, "messages": given, "answer": answer, "columns": dict(columns)}


class EnvironmentPool:
    """Worker processes that run the episodes of one environment, or of tools.

    Args:
        section: its settings.
        output: whether what it prints is logged.

    Attributes:
        tools: OpenAI's schemas of the tools, once it is started; None: a class is the environment.
    """

    def __init__(self, section: EnvironmentSection, *, output: bool = True) -> None:
        self._section = section
        task = _task_of(section, output=output)
        self._slots = [_Slot(task) for _ in range(section.workers)]
        self._numbers = itertools.count()
        self.tools: Sequence[Mapping[str, Any]] | None = None

    async def start(self) -> None:
        """Import the code in all workers. Raises: ValueError: says why it cannot be used."""
        try:
            # All of them to their end: one that is ending its process must not be cancelled.
            started = await asyncio.gather(*(slot.ready() for slot in self._slots), return_exceptions=True)
        except asyncio.CancelledError:
            await self.close()
            raise
        for found in started:
            if isinstance(found, BaseException):
                await self.close()
                raise ValueError(found.answer.error if isinstance(found, WorkerLost) else found) from found
            self.tools = found.form["tools"]

    async def open(self, row: Mapping[str, Any], seed: int, key: str) -> tuple["Episode", Sequence[Message]]:
        """Begin an episode in the worker that has the fewest.

        Args:
            row: the first argument of `reset` (JSON): prompt, messages, answer, columns.
            key: the episode's name in errors and logs.
        Returns: the episode, which must be closed, and messages to append to the row's own.
        Raises: EpisodeFailed.
        """
        slot = min(self._slots, key=lambda slot: slot.num_episodes)
        episode = Episode(slot, next(self._numbers), key, self._section.turn_timeout_s)
        try:
            return episode, await episode.reset(row, seed)
        except BaseException:
            await episode.close()
            raise

    async def close(self) -> None:
        """End the processes, busy ones too; calls that wait fail."""
        await asyncio.gather(*(slot.close() for slot in self._slots))


class Episode:
    """An open episode; `EnvironmentPool.open` makes it. Its calls are one after another."""

    def __init__(self, slot: "_Slot", number: int, key: str, turn_timeout_s: float) -> None:
        self._slot = slot
        self._number = number
        self._key = key
        self._turn_timeout_s = turn_timeout_s
        # The process that has it as far as `_past`.
        self._in: _Running | None = None
        # The calls so far, and what they returned.
        self._past: list[tuple[Sequence[Any], Any]] = []
        self._is_open = True
        slot.num_episodes += 1

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begin it. Returns: messages to append. Raises: EpisodeFailed."""
        messages: Sequence[Message] = await self._call([RESET, row, seed])
        return messages

    async def step(self, turn: AssistantTurn) -> TurnReply:
        """Hand a turn of the policy over. Raises: EpisodeFailed; only close() may follow it, or `done`."""
        given = {name: getattr(turn, name) for name in AssistantTurn.__slots__}
        return TurnReply.of(await self._call([STEP, given]))

    async def close(self) -> None:
        """Let the environment release what it has; idempotent. What fails is logged."""
        if not self._is_open:
            return
        self._is_open = False
        self._slot.num_episodes -= 1
        running = self._in
        if running is not None and not running.ended:
            with contextlib.suppress(_CallLost):
                async with self._slot.turn(alone=False):
                    answer = await running.call([self._number, CLOSE])
                if answer.failed:
                    log.warning("environment not closed", episode=self._key, why=answer.error or "late")

    async def _call(self, job: Sequence[Any]) -> Any:
        """Call a method, again if another call may have lost the worker. Raises: EpisodeFailed."""
        assert self._is_open, "a call of an episode that is closed"
        suspicions = 0
        while True:
            try:
                async with self._slot.turn(alone=suspicions > 0):
                    running = await self._slot.ready()
                    await self._build_again(running)
                    value = self._value(await running.call([self._number, *job]))
                    self._past.append((job, value))
                    return value
            except _CallLost as lost:
                suspicions += lost.guilty is None
                if lost.guilty or suspicions > MAX_REPLAYS:
                    self._in = None
                    kind: FailureKind = "late" if lost.answer.late else "killed"
                    raise EpisodeFailed(self._key, kind, lost.answer.error or lost.why) from lost
            except WorkerLost as lost:
                raise EpisodeFailed(self._key, "killed", f"no worker for it: {lost.answer.error}") from lost

    async def _build_again(self, running: "_Running") -> None:
        """Repeat its past in another process. Raises: EpisodeFailed: that differs."""
        if self._in is running:
            return
        self._in = running

        async def again(job: Sequence[Any]) -> Any:
            return self._value(await running.call([self._number, *job]))

        await repeat(self._key, self._past, again, "its worker process was lost")

    def _value(self, answer: Answer) -> Any:
        """Return the value of an answer. Raises: EpisodeFailed."""
        if answer.late:
            raise EpisodeFailed(self._key, "late", f"it took longer than turn_timeout_s = {self._turn_timeout_s:g} s")
        if answer.failed:
            raise EpisodeFailed(self._key, "error", answer.error)
        if isinstance(answer.value, dict):
            raise EpisodeFailed(self._key, "bad_reply", answer.value["bad_reply"])
        return answer.value


class _CallLost(Exception):
    """The worker of a call was lost. guilty: whether this call's code ran then; None: not known."""

    def __init__(self, lost: WorkerLost, *, guilty: bool | None) -> None:
        super().__init__(lost.why)
        self.answer, self.why, self.guilty = lost.answer, lost.why, guilty


class _Slot:
    """A worker process, or its replacements, and the turns of the calls that it does."""

    def __init__(self, task: Task) -> None:
        self.num_episodes = 0
        self._task = task
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        # Calls under way, and the most at a time; those that are to be the only one, begun ones too.
        self._calls, self._most, self._lonely = 0, 1, 0
        # Calls that wait, and those of them that are to be the only one.
        self._waiting, self._alone = deque[asyncio.Future[None]](), deque[asyncio.Future[None]]()

    async def ready(self) -> "_Running":
        """Return the process; start one if it has ended. Raises: WorkerLost: it does not start."""
        async with self._starting:
            if self._closed:
                raise WorkerLost(Answer(error="the environment is closed"), "closed")
            if self._running is None or self._running.ended:
                if self._running is not None:
                    await self._running.settle()
                    log.warning("environment worker started again: the one before has ended")
                    metrics.ENVIRONMENT_RESTARTS.inc()
                self._running = _Running(await WorkerProcess.start(self._task))
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


class _Running:
    """A process, and the calls that wait for its answers."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._places = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._lost = False

    @property
    def form(self) -> Mapping[str, Any]:
        """Work.form of its code."""
        return self._worker.form

    @property
    def ended(self) -> bool:
        """Whether it takes no more calls."""
        return self._lost or self._worker.ended

    async def call(self, job: Sequence[Any]) -> Answer:
        """Do a job; it ends if this is cancelled. Raises: _CallLost."""
        if self._lost:
            raise _CallLost(WorkerLost(Answer(error="its worker process was lost"), "lost"), guilty=False)
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
                future.set_exception(_CallLost(lost, guilty=guilty if known else None))


def _task_of(section: EnvironmentSection, *, output: bool) -> Task:
    """Describe what the workers do, with the code as it is now."""
    references = [section.function] if section.function is not None else section.tools
    code = [split_reference(reference) for reference in references]
    return Task(
        name=ENVIRONMENT,
        settings={
            "code": code,
            "sources": {place: read_source(place) for place, _ in code},
            "args": section.args,
            "as_tools": section.function is None,
            "turn_timeout_s": section.turn_timeout_s,
        },
        timeout_s=section.turn_timeout_s,
        wall_clock=True,
        start_timeout_s=section.start_timeout_s,
        memory_mib=section.memory_mib,
        # The coordinator bounds the calls; a worker must see each that is cancelled.
        concurrency=1 << 30,
        output=section.label if output else "",
        kind="environment",
    )


async def repeat(key: str, past: Sequence[tuple[Call, Any]], call: Callable[[Call], Awaitable[Any]], why: str) -> None:
    """Make the calls of an episode again, which was lost. Raises: EpisodeFailed: one fails, or returns another value.

    Args:
        past: each call, and what it had returned.
    """
    if past:
        metrics.EPISODE_REPLAYS.inc()
    for turn, (job, recorded) in enumerate(past):
        what = f"{why}, and when {f'turn {turn - 1}' if turn else 'reset'} was repeated"
        try:
            value = await call(job)
        except EpisodeFailed as failed:
            kind = failed.kind if failed.kind in ("late", "killed") else "not_repeatable"
            raise EpisodeFailed(key, kind, f"{what}: {failed.text}") from failed
        if value != recorded:
            text = f"{what}, it returned {_short(value)} where it had returned {_short(recorded)}"
            raise EpisodeFailed(key, "not_repeatable", text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
