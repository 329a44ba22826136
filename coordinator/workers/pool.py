"""Worker processes for code that may run for ever: every job has a deadline, the event loop stays free.

A job that takes too long is interrupted in its worker, or the kernel ends the worker (limits.py); a frozen worker is
killed. The job of a lost worker is late or an error; the jobs behind it go to its replacement. If the worker did
several at a time, each of them is tried alone, so that only the one to blame fails.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.workers.process import WorkerLost, WorkerProcess
from coordinator.workers.task import Answer, Task
from servicekit.lifecycle.tasks import cancel
from servicekit.logs import get_logger

log = get_logger(__name__)


class RewardWorkers:
    """Processes that do one task; they are started with the first jobs, or by `start`.

    Args:
        count: processes.
    """

    def __init__(self, task: Task, *, count: int) -> None:
        self._task = task
        self._idle: list[WorkerProcess | None] = [None] * count
        self._busy = asyncio.Lock()

    async def start(self) -> Mapping[str, Any]:
        """Start the processes. Returns: Work.form of their code. Raises: ValueError: says why they cannot."""
        starting = [asyncio.create_task(WorkerProcess.start(self._task), name="reward worker") for _ in self._idle]
        try:
            self._idle = list(await asyncio.gather(*starting))
        except WorkerLost as lost:
            await cancel(*starting)
            ready = [task.result() for task in starting if not task.cancelled() and task.exception() is None]
            await asyncio.gather(*(worker.end() for worker in ready))
            raise ValueError(lost.answer.error) from lost
        (first, *_) = self._idle
        return {} if first is None else first.form

    def tune(self, *, window: int, concurrency: int) -> None:
        """Set how many jobs a worker gets ahead, and does at a time; what is right may depend on its form."""
        self._task = replace(self._task, window=window, concurrency=concurrency)

    async def map(self, jobs: Sequence[Any], *, give_up_after: int | None = None) -> list[Answer]:
        """Run the jobs.

        Args:
            give_up_after: when more than so many have failed, the remaining jobs are not tried.
        Returns: [J] answers, in the order of the jobs.
        """
        async with self._busy:
            batch = _Batch(jobs, self._task, len(self._idle), give_up_after)
            shares = [
                asyncio.create_task(self._share(slot, batch), name=f"reward worker {slot}")
                for slot in range(min(len(self._idle), len(jobs)))
            ]
            try:
                await asyncio.gather(*shares)
            finally:
                for share in shares:
                    if not share.cancelling():  # a second cancellation would interrupt the ending of its process
                        share.cancel()
                await asyncio.gather(*shares, return_exceptions=True)
        return batch.result()

    async def close(self) -> None:
        """End the processes, busy ones too."""
        workers, self._idle = self._idle, [None] * len(self._idle)
        await asyncio.gather(*(worker.end() for worker in workers if worker is not None))

    async def _share(self, slot: int, batch: "_Batch") -> None:
        """Process jobs with one process, or its replacements, until none waits."""
        while batch.has_work:
            sent: dict[int, Any] = {}
            worker, self._idle[slot] = self._idle[slot], None
            try:
                if worker is None or worker.returncode is not None:
                    worker = await self._start(batch)
                    if worker is None:
                        return
                await self._exchange(worker, batch, sent)
                self._idle[slot] = worker
            except WorkerLost as lost:
                log.warning("reward worker lost", why=lost.why, pid=None if worker is None else worker.pid)
                batch.lost(sent, lost.answer)
            finally:
                if self._idle[slot] is None and worker is not None and worker.returncode is None:
                    await worker.end()

    async def _start(self, batch: "_Batch") -> WorkerProcess | None:
        """Start a process; None if it does not, which the batch notes."""
        try:
            return await WorkerProcess.start(self._task)
        except WorkerLost as lost:
            log.warning("reward worker not started", why=lost.why)
            batch.start_error = lost.answer.error
            return None

    async def _exchange(self, worker: WorkerProcess, batch: "_Batch", sent: dict[int, Any]) -> None:
        """Send jobs and record their answers until none waits; `sent` holds those without an answer.

        Raises: WorkerLost.
        """
        while True:
            more = batch.take(sent)
            if more:
                sent |= more
                worker.send(more.items())
            elif not sent:
                return
            place, answer = await worker.answer()
            del sent[place]
            batch.record(place, answer)


class _Batch:
    """The jobs of one call: those that wait, and the answers of the others."""

    def __init__(self, jobs: Sequence[Any], task: Task, num_workers: int, give_up_after: int | None) -> None:
        self._waiting = deque(enumerate(jobs))
        # Jobs that a lost worker did at the same time: one of them is to blame.
        self._suspects: deque[tuple[int, Any]] = deque()
        self._alone: set[int] = set()
        self._answers: list[Answer | None] = [None] * len(jobs)
        self._task = task
        self._num_workers = num_workers
        self._give_up_after = give_up_after
        self._num_failed = 0
        # Why a worker could not be started.
        self.start_error = ""

    @property
    def has_work(self) -> bool:
        """Whether jobs wait."""
        return bool(self._waiting or self._suspects)

    def take(self, sent: Mapping[int, Any]) -> dict[int, Any]:
        """Take the next jobs for a worker that has `sent` to do: as many as keep it busy, near the end a fair share."""
        if self._suspects or self._alone.intersection(sent):
            if sent:
                return {}
            place, job = self._suspects.popleft()
            self._alone.add(place)
            return {place: job}
        if len(sent) > self._task.window // 2:
            return {}
        fair = max(1, len(self._waiting) // (2 * self._num_workers))
        at_a_time = min(self._task.concurrency, -(-len(self._answers) // self._num_workers))
        number = min(self._task.window - len(sent), max(fair, at_a_time - len(sent)), len(self._waiting))
        return dict(self._waiting.popleft() for _ in range(number))

    def record(self, place: int, answer: Answer) -> None:
        """Record an answer; after too many failures no further job is tried."""
        self._answers[place] = answer
        self._num_failed += answer.failed
        if self._give_up_after is not None and self._num_failed > self._give_up_after:
            self._waiting.clear()
            self._suspects.clear()

    def lost(self, sent: Mapping[int, Any], answer: Answer) -> None:
        """Record that a worker was lost with these jobs, in the order in which they were sent."""
        begun = dict(itertools.islice(sent.items(), self._task.concurrency))
        rest = [(place, job) for place, job in sent.items() if place not in begun]
        self._waiting.extendleft(reversed(rest))
        if len(begun) > 1:
            self._suspects.extend(begun.items())
            return
        for place in begun:
            self.record(place, answer)

    def result(self) -> list[Answer]:
        """Return the answers of all jobs."""
        untried = Answer(error=self.start_error) if self.start_error else Answer(tried=False)
        return [untried if answer is None else answer for answer in self._answers]
