"""The coordinator's side of one worker process: it starts, gets jobs, answers, and is ended."""

import asyncio
import contextlib
import dataclasses
import json
import mmap
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.workers.output import Output
from coordinator.workers.task import DOING_BYTES, Answer, Task

_END_TIMEOUT_S = 5.0
# Longest line of an answer: the scores of a batch.
_MAX_LINE_BYTES = 1 << 24


class WorkerLost(Exception):
    """A worker ended, froze or did not start; `answer` is that of its current job."""

    def __init__(self, answer: Answer, why: str) -> None:
        super().__init__(why)
        self.answer, self.why = answer, why


class WorkerProcess:
    """A worker that is ready.

    Args:
        doing: shared with it: 1 + the place of the job whose code runs, else 0.
        output: None: what it prints is discarded.
    """

    def __init__(self, task: Task, process: Process, doing: mmap.mmap, output: Output | None) -> None:
        self._task = task
        self._process = process
        self.pid = process.pid
        self._doing = doing
        self._output = output
        # Once it has ended: the place of the job whose code ran then; -1: none, or not known.
        self.died_in = -1
        with contextlib.suppress(ProcessLookupError):  # it has ended before it could start any other
            ending = os.pidfd_open(process.pid)
            asyncio.get_running_loop().add_reader(ending, self._end_group, ending)
        # Work.form of its code.
        self.form: Mapping[str, Any] = {}

    @classmethod
    async def start(cls, task: Task) -> "WorkerProcess":
        """Start a worker and wait until it is ready. Raises: WorkerLost: it does not get there."""
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        memory = os.memfd_create("doing")
        os.truncate(memory, DOING_BYTES)
        doing = mmap.mmap(memory, DOING_BYTES)
        spawning = asyncio.create_task(asyncio.create_subprocess_exec(
            sys.executable, "-m", "coordinator.workers.worker", str(os.getpid()), str(memory), pass_fds=[memory],
            stdin=PIPE, stdout=PIPE, stderr=PIPE if task.output else DEVNULL, env=environ, limit=_MAX_LINE_BYTES,
        ))  # fmt: skip
        spawning.add_done_callback(lambda _: os.close(memory))
        try:
            process = await asyncio.shield(spawning)
        except asyncio.CancelledError:  # uvloop would leave the process running
            await cls(task, await spawning, doing, None).end()
            raise
        printed = process.stderr
        output = None if printed is None else Output(task.kind, task.output, process.pid, printed)
        worker = cls(task, process, doing, output)
        try:
            worker._write(json.dumps(dataclasses.asdict(task)) + "\n")
            answer = await worker._line(task.start_timeout_s)
            if "error" in answer:
                raise WorkerLost(Answer(error=answer["error"]), f"did not start: {answer['error']}")
        except WorkerLost as lost:
            await worker.end()
            if lost.answer.late:
                raise WorkerLost(Answer(error=f"not ready within {task.start_timeout_s:g} s"), lost.why) from None
            if lost.why == "died":
                raise WorkerLost(Answer(error=f"{lost.answer.error} before it was ready"), lost.why) from None
            raise
        except BaseException:
            await worker.end()
            raise
        worker.form = answer["form"]
        return worker

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.returncode

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended."""
        assert self._process.stdout is not None
        return self._process.returncode is not None or self._process.stdout.at_eof()

    def send(self, jobs: Iterable[tuple[int, Any]]) -> None:
        """Send jobs with their places. Not waited for: a frozen worker must not block us."""
        self._write("".join(json.dumps(job) + "\n" for job in jobs))

    async def answer(self) -> tuple[int, Answer]:
        """Wait for the next answer. Returns: the job's place, and the answer. Raises: WorkerLost."""
        place, answer = await self._line(self._task.silence_s)
        return place, Answer(**answer)

    async def end(self) -> None:
        """Kill it, if it has not ended, and wait until it has."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._wait_ended()

    def _write(self, text: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.is_closing():  # the process has ended, which the next answer tells; uvloop refuses the write
            stdin.write(text.encode())

    async def _line(self, timeout_s: float) -> Any:
        """Read the next line. Raises: WorkerLost: none arrives in time, or the worker has ended."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise WorkerLost(Answer(late=True), f"no answer within {timeout_s:g} s") from None
        except ValueError:
            raise ValueError(f"more than {_MAX_LINE_BYTES >> 20} MiB") from None
        if line:
            return json.loads(line)
        # Not killed: that would take its exit status away from asyncio, which is about to collect it.
        await self._wait_ended()
        if self.returncode == -signal.SIGXCPU:  # from the kernel, or from itself (_serve_async)
            raise WorkerLost(Answer(late=True), "did not react to its limit and was ended")
        raise WorkerLost(Answer(error=f"its worker process {_ended(self.returncode)}"), "died")

    async def _wait_ended(self) -> None:
        if self._doing.closed:
            return  # it has ended before
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._process.wait()  # and until no other process holds its pipes
        if not self._doing.closed:
            self.died_in = int.from_bytes(self._doing[:], sys.byteorder) - 1
            self._doing.close()
        if self._output is not None:
            await self._output.end()

    def _end_group(self, ending: int) -> None:
        """Kill the processes that its code has started, which are in its group, when it has ended."""
        asyncio.get_running_loop().remove_reader(ending)
        os.close(ending)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _ended(status: int | None) -> str:
    """Describe an exit status.

    >>> _ended(3), _ended(-9), _ended(-11)
    ('exited with status 3', 'was ended by SIGKILL (out of memory?)', 'was ended by SIGSEGV')
    """
    if status is None or status >= 0:
        return "does not answer" if status is None else f"exited with status {status}"
    memory = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{memory}"
