"""Others that get each finished iteration: stored samples, experiment trackers. None of them can harm the run.

Each works in a daemon thread of its own: one that blocks, for a network or a disk, delays neither the iterations nor
the end of the run.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.learn.evaluation import EvaluationResult
from servicekit.logs import get_logger
from tandem_clients.flow import IterationRecord
from tandem_files.metrics_file import Row

# Iterations that wait for a slow sink, with all their samples; further ones are left out.
MAX_WAITING = 4
# For what a sink still has to write when the run ends, over all sinks.
CLOSE_TIMEOUT_S = 30.0

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinishedIteration:
    """An iteration whose row was written, with all that there is to tell about it."""

    # None: an evaluation before the first iteration.
    record: IterationRecord | None
    row: Row
    evaluated: Sequence[EvaluationResult] = ()


class Sink(Protocol):
    """Gets finished iterations, one at a time, in order; a resumed run repeats those after its checkpoint."""

    @property
    def name(self) -> str:
        """What the warning calls it when it fails."""

    def take(self, finished: FinishedIteration) -> str | None:
        """Store or send an iteration; it may block. Whatever it raises ends this sink, not the run.

        Returns: a warning for the run's user, if there is one.
        """

    def close(self) -> str | None:
        """Write what is held back. Returns: a warning for the run's user, if there is one."""


class Sinks:
    """All sinks of a run.

    Args:
        warn: gets a warning for the run's user, in the event loop's thread.
    """

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[str], None]) -> None:
        self._feeds = [_Feed(sink) for sink in sinks]
        self._warn = warn

    def take(self, finished: FinishedIteration) -> None:
        """Give an iteration to every sink, without waiting for any; warn of those that have failed since."""
        for feed in self._feeds:
            feed.put(finished)
        self._report()

    async def close(self) -> None:
        """Close every sink; wait for all together at most CLOSE_TIMEOUT_S. Idempotent."""
        for feed in self._feeds:
            feed.end()
        await asyncio.to_thread(self._wait)
        self._report()
        self._feeds = []

    def _wait(self) -> None:
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for feed in self._feeds:
            feed.wait(deadline)

    def _report(self) -> None:
        for feed in self._feeds:
            for complaint in feed.complaints():
                self._warn(complaint)


class _Feed:
    """A sink's queue and its thread, which starts with the first iteration."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: queue.Queue[FinishedIteration | None] = queue.Queue(MAX_WAITING + 1)
        self._complaints: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sink {sink.name}", daemon=True)
        self._left_out = 0
        self._failed = False

    def put(self, finished: FinishedIteration) -> None:
        if self._failed:
            return
        if self._thread.ident is None:
            self._thread.start()
        if self._waiting.qsize() >= MAX_WAITING:
            self._left_out += 1
            if self._left_out == 1:
                self._complaints.put(f"{self._sink.name} is more than {MAX_WAITING} iterations late: it misses some")
            return
        self._waiting.put_nowait(finished)

    def end(self) -> None:
        """Ask the thread to close the sink after what is waiting."""
        if self._thread.ident is not None:
            self._waiting.put_nowait(None)

    def wait(self, deadline: float) -> None:
        """Wait until the thread has ended; complain if it has not at `deadline` (monotonic seconds)."""
        if self._thread.ident is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._complaints.put(f"{self._sink.name} did not finish in time: its last iterations may be missing")

    def complaints(self) -> list[str]:
        """Return the complaints since the last call."""
        found = []
        while not self._complaints.empty():
            found.append(self._complaints.get())
        return found

    def _work(self) -> None:
        try:
            while (finished := self._waiting.get()) is not None:
                if remark := self._sink.take(finished):
                    self._complaints.put(remark)
            if remark := self._sink.close():
                self._complaints.put(remark)
        except BaseException as error:  # a library's exit, too, ends its sink alone
            self._failed = True
            log.warning("sink failed", sink=self._sink.name, exc_info=True)
            self._complaints.put(
                f"{self._sink.name} failed and is left out from now on: {type(error).__name__}: {error}"
            )
