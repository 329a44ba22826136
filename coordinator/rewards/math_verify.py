"""Reward 1 when the completion's mathematical answer equals the reference, by the math-verify library.

Sympy can take seconds or hang on one expression, so texts are scored in worker processes: the event loop stays free,
and a chunk that is late costs its scores (0, counted) and not the run.
"""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from coordinator.rewards.base import ScoredText, Scores, score_each

# Texts per task: one is scored in about a millisecond, so that a task outweighs its hand-over.
_CHUNK = 32
# Longest that math-verify may work on one text: once for parsing each side, once for comparing.
_ITEM_TIMEOUT_S = 2
_START_TIMEOUT_S = 60
# Longest for a chunk whose every item is slow, and for the first chunk, which waits for the workers' start.
_CHUNK_TIMEOUT_S = _START_TIMEOUT_S + _CHUNK * 3 * _ITEM_TIMEOUT_S


class MathVerify:
    """1.0 if math-verify finds the completion's answer equal to the reference, else 0.0.

    Args:
        num_workers: processes that score.
        timeout_s: longest wait for all chunks of one call; what is not scored by then is 0 and counted.
    """

    def __init__(self, *, num_workers: int = 2, timeout_s: float = _CHUNK_TIMEOUT_S) -> None:
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._pool: ProcessPoolExecutor | None = None

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """[S] scores of 0.0 or 1.0."""
        chunks = [items[start : start + _CHUNK] for start in range(0, len(items), _CHUNK)]
        pool = self._open_pool()
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(pool, score_chunk, list(chunk)) for chunk in chunks]
        if futures:
            await asyncio.wait(futures, timeout=self._timeout_s)
        parts = [_result(future, len(chunk)) for future, chunk in zip(futures, chunks, strict=True)]
        if any(part.num_errors == len(chunk) for part, chunk in zip(parts, chunks, strict=True)):
            # Late or dead workers may never come back: the next call starts new ones.
            self.close()
        return _joined(parts)

    def close(self) -> None:
        """End the worker processes, busy ones too."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # "spawn": forking a process that runs gRPC threads can deadlock the child.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._num_workers, mp_context=context, initializer=_get_ready)
        return self._pool


def _get_ready() -> None:
    """Of a worker: what sympy and its parser load with the first expression must not count against a text's time."""
    _end_with_parent()
    example = ScoredText(completion="$x^2 + 2x + 1$", answer="$(x+1)^2$", truncated=False)
    _score_one(example, timeout_s=_START_TIMEOUT_S)


def score_chunk(items: Sequence[ScoredText]) -> Scores:
    """Score texts in a worker process (math-verify's own timeout needs its main thread)."""
    return score_each(_score_one, items)


def _score_one(item: ScoredText, timeout_s: int = _ITEM_TIMEOUT_S) -> float:
    # Imported in the workers only: sympy takes 0.4 s and 60 MB.
    from math_verify import parse, verify

    reference = parse(item.answer, parsing_timeout=timeout_s) or parse(f"${item.answer}$", parsing_timeout=timeout_s)
    found = parse(item.completion, parsing_timeout=timeout_s)
    return float(verify(reference, found, timeout_seconds=timeout_s))


def _result(future: "asyncio.Future[Scores]", size: int) -> Scores:
    if not future.done():
        future.cancel()
        return Scores(values=[0.0] * size, num_errors=size, first_error="math-verify did not answer in time")
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, BrokenProcessPool):
        return Scores(values=[0.0] * size, num_errors=size, first_error=f"a math-verify process died: {error}")
    raise error


def _joined(parts: Sequence[Scores]) -> Scores:
    return Scores(
        values=[value for part in parts for value in part.values],
        num_errors=sum(part.num_errors for part in parts),
        first_error=next((part.first_error for part in parts if part.first_error), ""),
    )


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever: leave when the parent's sentinel fires."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
