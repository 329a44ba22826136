"""How fast this machine is: what a simulation needs to know, measured over loopback and in memory."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from weightsync.plans.cost import Speeds
from weightsync.transfer.communicators.communicator import Communicator, form, join_store
from weightsync.transfer.communicators.tcp_store import bound_store
from weightsync.transfer.digest import PayloadDigest

BUCKET_BYTES = 4 * 2**20


@contextmanager
def pair() -> Iterator[list[list[Communicator]]]:
    """Two pairs of connected ranks."""
    pairs = []
    for number in range(2):
        store, port = bound_store("127.0.0.1", 10)

        def joined(rank: int, store: Any = store, port: int = port, number: int = number) -> Communicator:
            mine = store if rank == 0 else join_store(f"127.0.0.1:{port}", 10)
            return form(
                mine,
                name=f"speed{number}",
                rank=rank,
                slots=("a", "b"),
                host="127.0.0.1",
                device=torch.device("cpu"),
                timeout_s=10,
            )

        with ThreadPoolExecutor(2) as pool:
            pairs.append(list(pool.map(joined, range(2))))
    try:
        yield pairs
    finally:
        for ends in pairs:
            for end in ends:
                end.abort()


def measure_speeds(pairs: list[list[Communicator]], threads: int) -> Speeds:
    """Each of the machine's speeds once; about 0.3 s. Memory is walked through, as in a round: caches do not help."""
    link, links = _link_rate(pairs[:1]), _link_rate(pairs)
    cores = max(1.0, _rate(_copy, threads) / (copy := _rate(_copy, 1)))
    piece_s = _message_s(pairs, window=64)
    return Speeds(
        trainer_link=link,
        rollout_link=link,
        latency_s=max(0.0, 2 * _message_s(pairs, window=2) - piece_s),
        segment_s=piece_s / 4,  # two pairs, two ends each
        copy=copy,
        digest=_rate(_digest, 1),
        op_s=_small_copy_s(),
        cores=cores,
        # Two concurrent pairs go 2 x cores / (2 x link_cores) as fast as one alone, if that is less than 2.
        link_cores=max(0.5, min(2.0, cores * link / links)),
    )


def mean_speeds(samples: Sequence[Speeds]) -> Speeds:
    """By field."""
    fields = [asdict(sample) for sample in samples]
    return Speeds(**{name: statistics.mean(sample[name] for sample in fields) for name in fields[0]})


_NUM_PAYLOADS = 32
_ARENA = torch.zeros(_NUM_PAYLOADS, BUCKET_BYTES, dtype=torch.uint8)


def _digest(number: int) -> None:
    digest = PayloadDigest()
    digest.update(_ARENA[number % _NUM_PAYLOADS])
    digest.digest()


def _copy(number: int) -> None:
    """A payload's worth of half rows."""
    pages = _ARENA.view(torch.float32).view(-1, 2048, 1024)[number % (_NUM_PAYLOADS // 2)]
    pages[:1024].copy_(pages[1024:, :])


def _rate(work: Callable[[int], None], threads: int, times: int = 8) -> float:
    """Bytes/s of so many threads that each handle `times` payloads."""

    def repeat(thread: int) -> None:
        for number in range(times):
            work(thread * times + number)

    return threads * times * BUCKET_BYTES / _together([partial(repeat, thread) for thread in range(threads)])


def _small_copy_s(times: int = 256) -> float:
    rows = _ARENA.view(torch.float32)

    def repeat() -> None:
        for number in range(times):
            rows[0, number * 64 : number * 64 + 64].copy_(rows[1, :64])

    return _together([repeat]) / times


def _link_rate(pairs: list[list[Communicator]], times: int = 12) -> float:
    """Bytes/s of all pairs together, two messages in flight."""
    work = []
    for number, ends in enumerate(pairs):
        mine = list(_ARENA[number * 16 : number * 16 + 16])
        work.append(partial(_stream, ends[0].send, ends[0], 1, mine[:8], times))
        work.append(partial(_stream, ends[1].receive, ends[1], 0, mine[8:], times))
    return len(pairs) * times * BUCKET_BYTES / _together(work)


def _message_s(pairs: list[list[Communicator]], window: int, times: int = 64) -> float:
    """Seconds per message of a few bytes, on all pairs together."""
    work = []
    for ends in pairs:
        buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(4)]
        work.append(partial(_stream, ends[0].send, ends[0], 1, buffers[:2], times, window))
        work.append(partial(_stream, ends[1].receive, ends[1], 0, buffers[2:], times, window))
    return _together(work) / times


def _together(work: Sequence[Callable[[], None]]) -> float:
    """Seconds until all are done, each in a thread of its own, from when all threads are there."""
    barrier = threading.Barrier(len(work) + 1)

    def begin(one: Callable[[], None]) -> None:
        barrier.wait(10)
        one()

    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(begin, one) for one in work]
        barrier.wait(10)
        start = time.perf_counter()
        for future in futures:
            future.result()
        return time.perf_counter() - start


def _stream(
    start: Callable[..., Any],
    end: Communicator,
    peer: int,
    buffers: list[torch.Tensor],
    times: int,
    window: int = 2,
) -> None:
    pending: list[Any] = []
    for number in range(times):
        if len(pending) == window:
            end.wait(pending.pop(0), peer, 10)
        pending.append(start(buffers[number % len(buffers)], peer, number))
    for one in pending:
        end.wait(one, peer, 10)
