"""A worker process for code that may run for ever or end its process: a user's pattern, sympy, a user's own code.

    python -m coordinator.workers.worker PARENT_PID MEMORY

MEMORY is a file descriptor: while code of a coroutine runs, its place is there, so that whoever ends us is known.
Lines of JSON. First in: what to do (`Task`); first out: `{"ready": true, "form": ...}` or `{"error": ...}`. Then in:
`[place, job]`; out: `[place, answer]`, an answer being `{"value": ...}`, `{"late": true}` or `{"error": "..."}`, with
the `seconds` that it took. `[place, null]` cancels a coroutine.

They are taken from stdin and stdout before any other code runs: what that prints goes to stderr, and it reads nothing.
"""

import asyncio
import faulthandler
import json
import logging
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from coordinator.workers import tasks
from coordinator.workers.limits import CpuTimer, Late, Timer, WallTimer, limit_memory, relieve
from coordinator.workers.signature import Unfit
from coordinator.workers.task import DOING_BYTES, Work
from servicekit.lifecycle.children import die_with_parent

# Longest line of a job: all texts of a batch.
_MAX_LINE_BYTES = 1 << 30
# What a coroutine that is cancelled has for its own clean-up.
_ENDING_S = 10.0


@dataclass(frozen=True)
class _Channel:
    """The connection to the coordinator."""

    jobs: TextIO
    answers: TextIO

    def write(self, answer: Any) -> None:
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()


def main() -> None:
    """Serve until the coordinator closes the connection."""
    die_with_parent(int(sys.argv[1]))
    os.setpgid(0, 0)  # what it starts is in its group, and ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the coordinator
    doing = mmap.mmap(int(sys.argv[2]), DOING_BYTES)
    os.close(int(sys.argv[2]))
    channel = _take_streams()
    spec = json.loads(channel.jobs.readline() or "null")
    if spec is None:
        return
    limit_memory(spec["memory_mib"])
    if not spec["output"]:
        logging.disable(logging.CRITICAL)  # math-verify would log the completion
    try:
        work = tasks.TASKS[spec["name"]](**spec["settings"])
    except BaseException as error:  # noqa: BLE001 - the boundary of the code: the coordinator says it
        channel.write({"error": str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"})
        return
    channel.write({"ready": True, "form": dict(work.form)})
    if work.is_async:
        # Not asyncio.run(): where code ends the loop (sys.exit() in a task), it would fail all jobs as cancelled.
        asyncio.Runner().run(_serve_async(channel, work, doing, spec["timeout_s"], spec["concurrency"]))
    else:
        _serve(channel, work, (WallTimer if spec["wall_clock"] else CpuTimer)(spec["timeout_s"]))


def _take_streams() -> _Channel:
    """Keep stdin and stdout for the coordinator alone; copies are not inherited by processes that are started here."""
    channel = _Channel(os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    faulthandler.enable()
    return channel


def _serve(channel: _Channel, work: Work, timer: Timer) -> None:
    for line in channel.jobs:
        place, job = json.loads(line)
        started_s = time.monotonic()
        channel.write([place, _answer(work, timer, job) | _since(started_s)])


def _since(started_s: float) -> dict[str, float]:
    return {"seconds": round(time.monotonic() - started_s, 6)}


def _answer(work: Work, timer: Timer, job: Any) -> dict[str, Any]:
    try:
        return {"value": timer.run(lambda: work.call(job))}
    except Late:
        return {"late": True}
    except BaseException as error:  # noqa: BLE001 - the boundary of one job: the coordinator counts it
        return _failed(work, error)


def _failed(work: Work, error: BaseException) -> dict[str, Any]:
    text = work.describe(error)
    relieve(error)
    return {"error": text}


@dataclass(frozen=True)
class _Marked:
    """An awaitable: a job's coroutine, with its place in `doing` while its code runs."""

    coroutine: Coroutine[Any, Any, Any]
    place: int
    doing: mmap.mmap

    def __await__(self) -> Generator[Any, Any, Any]:
        mine, nothing = ((1 + self.place).to_bytes(DOING_BYTES, sys.byteorder), bytes(DOING_BYTES))
        resume: Callable[[], Any] = partial(self.coroutine.send, None)
        while True:
            self.doing[:] = mine
            try:
                waits_for = resume()
            except StopIteration as end:
                return end.value
            finally:
                self.doing[:] = nothing
            try:
                resume = partial(self.coroutine.send, (yield waits_for))
            except BaseException as error:  # noqa: BLE001 - handed on
                resume = partial(self.coroutine.throw, error)


async def _serve_async(channel: _Channel, work: Work, doing: mmap.mmap, timeout_s: float, concurrency: int) -> None:
    """Do up to `concurrency` jobs at a time, in the order in which they came."""
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), channel.jobs)
    free = asyncio.Semaphore(concurrency)
    running: dict[int, asyncio.Task[None]] = {}

    def expect_end(place: int) -> None:
        """End the process if a job that is cancelled does not end: its code may catch that, and continue for ever."""
        loop.call_later(_ENDING_S, end_unless_done, place, running[place])

    def end_unless_done(place: int, task: "asyncio.Task[None]") -> None:
        if not task.done():
            doing[:] = (1 + place).to_bytes(DOING_BYTES, sys.byteorder)
            signal.raise_signal(signal.SIGXCPU)

    async def do(place: int, job: Any) -> None:
        due = loop.call_later(timeout_s, expect_end, place)
        try:
            started_s = time.monotonic()
            call = _Marked(work.call(job), place, doing)
            channel.write([place, await _answer_async(work, timeout_s, call) | _since(started_s)])
        finally:
            due.cancel()
            del running[place]
            free.release()

    while True:
        await free.acquire()
        line = await reader.readline()
        if not line:
            return
        place, job = json.loads(line)
        if job is not None:
            running[place] = asyncio.create_task(do(place, job))
            continue
        free.release()
        await asyncio.sleep(0)  # one that has not begun would end without an answer
        if place in running:
            running[place].cancel()
            expect_end(place)


async def _answer_async(work: Work, timeout_s: float, call: _Marked) -> dict[str, Any]:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return {"value": await call}
    except BaseException as error:  # noqa: BLE001 - the boundary of one job; some libraries' are no Exception
        late = isinstance(error, Late) or (isinstance(error, TimeoutError) and limit.expired())
        return {"late": True} if late else _failed(work, error)


if __name__ == "__main__":
    main()
