"""Worker processes for code that may run forever: every job has a deadline, the event loop stays free.

A job that takes too much CPU time is interrupted in its worker, or the kernel ends the worker (worker.py); a frozen
worker is killed. The current job of a lost worker is late or an error; the jobs behind it go to its replacement.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servicekit.logs import get_logger

# For importing sympy on a busy host.
_START_TIMEOUT_S = 60.0
# Clock time allowed for a job's CPU time: on a busy host a worker gets only a part of a core.
_SLACK_FACTOR, _SLACK_S = 10.0, 10.0
_END_TIMEOUT_S = 5.0
# Jobs sent to a worker together: it need not wait for the next one, and a slow job delays few others.
_CHUNK = 8

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer of one job: a value (JSON), or late, or an error."""

    value: Any = None
    late: bool = False
    error: str = ""


class RewardWorkers:
    """Processes that do one task; they are started with the first jobs.

    Args:
        task: a name in tasks.TASKS.
        settings: arguments of that task.
        count: processes.
        timeout_s: CPU seconds that a job may take.
    """

    def __init__(self, task: str, settings: Mapping[str, Any], *, count: int, timeout_s: float) -> None:
        self._arguments = [task, json.dumps(dict(settings)), str(timeout_s), str(os.getpid())]
        self._silence_s = _SLACK_FACTOR * timeout_s + _SLACK_S
        self._idle: list[Process | None] = [None] * count
        self._chunk = _CHUNK
        self._busy = asyncio.Lock()

    async def map(self, jobs: Sequence[Mapping[str, Any]], *, give_up_after: int | None = None) -> list[Answer]:
        """Run the jobs.

        Args:
            give_up_after: after more late answers than this, the remaining jobs are not tried and count as late too.
        Returns: [J] answers, in the order of the jobs.
        """
        answers: list[Answer | None] = [None] * len(jobs)
        waiting = deque(enumerate(jobs))
        async with self._busy:
            self._chunk = max(1, min(_CHUNK, len(jobs) // len(self._idle)))
            shares = [
                asyncio.create_task(self._share(slot, waiting, answers, give_up_after), name=f"worker {slot}")
                for slot in range(min(len(self._idle), len(jobs)))
            ]
            try:
                await asyncio.gather(*shares)
            finally:
                for share in shares:
                    if not share.cancelling():  # a second cancellation would interrupt the ending of its process
                        share.cancel()
                await asyncio.gather(*shares, return_exceptions=True)
        return [Answer(late=True) if answer is None else answer for answer in answers]

    async def close(self) -> None:
        """End the processes, busy ones too."""
        processes, self._idle = self._idle, [None] * len(self._idle)
        await asyncio.gather(*(_end(process) for process in processes if process is not None))

    async def _share(
        self,
        slot: int,
        waiting: deque[tuple[int, Mapping[str, Any]]],
        answers: list[Answer | None],
        give_up_after: int | None,
    ) -> None:
        """Process jobs with one process, or its replacements, until none waits."""
        while waiting:
            late = sum(answer is not None and answer.late for answer in answers)
            if give_up_after is not None and late > give_up_after:
                waiting.clear()
                return
            mine = deque(waiting.popleft() for _ in range(min(self._chunk, len(waiting))))
            process, self._idle[slot] = self._idle[slot], None
            try:
                if process is None:
                    process = await _start(self._arguments)
                await self._exchange(process, mine, answers)
                self._idle[slot] = process
            except _Lost as lost:
                place, _ = mine.popleft()
                answers[place] = lost.answer
                waiting.extendleft(reversed(mine))
                log.warning("reward worker lost", why=lost.why)
            finally:
                if self._idle[slot] is None and process is not None and process.returncode is None:
                    await _end(process)

    async def _exchange(
        self, process: Process, mine: deque[tuple[int, Mapping[str, Any]]], answers: list[Answer | None]
    ) -> None:
        """Send the jobs, record their answers and remove them from `mine`.

        Raises: _Lost: with the answer of the first job that is left.
        """
        assert process.stdin is not None
        # Not drained: a frozen worker must not block us, and the jobs are in our memory anyway.
        process.stdin.write("".join(json.dumps(job) + "\n" for _, job in mine).encode())
        while mine:
            answer = await _read(process, self._silence_s)
            place, _ = mine.popleft()
            answers[place] = Answer(**answer)


class _Lost(Exception):
    """A worker ended, froze or did not start; `answer` is that of its current job."""

    def __init__(self, answer: Answer, why: str) -> None:
        super().__init__(why)
        self.answer, self.why = answer, why


async def _start(arguments: Sequence[str]) -> Process:
    """Start a worker and wait until it is ready. Raises: _Lost: it does not start."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.learn.rewards.worker", *arguments,
        stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environ,
    )  # fmt: skip
    try:
        answer = await _read(process, _START_TIMEOUT_S)
        if "error" in answer:
            raise _Lost(Answer(error=answer["error"]), f"did not start: {answer['error']}")
    except BaseException:
        await _end(process)
        raise
    return process


async def _read(process: Process, timeout_s: float) -> dict[str, Any]:
    """Read the next line. Raises: _Lost: none arrives in time, or the worker has ended."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
    except TimeoutError:
        raise _Lost(Answer(late=True), f"no answer within {timeout_s:g} s") from None
    if not line:
        # Not killed: that would take its exit status away from asyncio, which is about to collect it.
        await _wait_ended(process)
        if process.returncode == -signal.SIGXCPU:
            raise _Lost(Answer(late=True), "did not react to its CPU limit and was ended by the kernel")
        raise _Lost(Answer(error=f"a reward worker died (exit status {process.returncode})"), "died")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _end(process: Process) -> None:
    """Kill a worker, if it has not ended, and wait until it has."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await _wait_ended(process)


async def _wait_ended(process: Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            await process.wait()
