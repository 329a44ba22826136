"""Episodes of a user's environment, in worker processes that each hold many of them.

An episode stays with its worker. When that is lost, each of its episodes is built again in the next process before its
next call: constructor, reset, and the turns so far, whose replies must be the same. The call whose code ran when the
worker was lost fails. If that is not known, each of those that were under way is tried alone, and fails if it is again.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from coordinator.environments.slot import CallLost, RunningWorker, WorkerSlot
from coordinator.watch import metrics
from coordinator.workers.episodes.replies import AssistantTurn, Message
from coordinator.workers.episodes.serving import CLOSE, RESET, STEP
from coordinator.workers.own_code import read_source
from coordinator.workers.process import WorkerLost
from coordinator.workers.task import Answer, Task
from coordinator.workers.tasks import ENVIRONMENT
from servicekit.logs import get_logger
from tandem_config.sections.environment import EnvironmentSection
from tandem_config.sections.reward import split_reference

Call = TypeVar("Call")
FailureKind = Literal["late", "error", "killed", "not_repeatable", "bad_reply"]

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
        self._slots = [WorkerSlot(task) for _ in range(section.workers)]
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

    def __init__(self, slot: WorkerSlot, number: int, key: str, turn_timeout_s: float) -> None:
        self._slot = slot
        self._number = number
        self._key = key
        self._turn_timeout_s = turn_timeout_s
        # The process that has it as far as `_past`.
        self._in: RunningWorker | None = None
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
            with contextlib.suppress(CallLost):
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
            except CallLost as lost:
                suspicions += lost.guilty is None
                if lost.guilty or suspicions > MAX_REPLAYS:
                    self._in = None
                    kind: FailureKind = "late" if lost.answer.late else "killed"
                    raise EpisodeFailed(self._key, kind, lost.answer.error or lost.why) from lost
            except WorkerLost as lost:
                raise EpisodeFailed(self._key, "killed", f"no worker for it: {lost.answer.error}") from lost

    async def _build_again(self, running: RunningWorker) -> None:
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
