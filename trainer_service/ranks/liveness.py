"""Liveness of ranks: each rank beats in the TCP store; after a failure rank 0 finds out which rank caused it.

A failed collective only says that *a* peer is lost, not which one or why. Keys in the store:
    beat/RANK       counter, written every BEAT_S
    failure/RANK    JSON of an unexpected error, written before the process ends
    stop            a follower was asked to stop: rank 0 stops the trainer
    interrupt       id of the sync round that rank 0 aborts: a rank that waits in it stops waiting
    failures        number of failure reports
"""

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch.distributed as dist

from servicekit.lifecycle.exit_codes import EXIT_FAILED
from servicekit.logs import get_logger
from servicekit.redis.failures import record_failure

BEAT_S = 0.5
# A rank whose counter has not changed for so long is lost or frozen; a busy host delays a thread by less.
SILENT_S = 4 * BEAT_S
# Between another rank's report and our own exit: time for the collective in which we wait to fail by itself.
GRACE_S = 5.0

ROLE = "trainer"

log = get_logger(__name__)


def failure_name(rank: int) -> str:
    """Return the name under which `tandem status` shows a failure: the service's for rank 0, else the rank's."""
    return ROLE if rank == 0 else f"{ROLE}-rank-{rank}"


class Liveness:
    """Beats from a daemon thread, and ends this process when another rank has failed or rank 0 is lost."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        # a connection of its own: a blocking call on a shared one would stop the beat
        self._store = store.clone()
        self._rank, self._world_size = rank, world_size
        self._on_stop: Callable[[str], None] = lambda _: None
        # Called with a round's id on every rank but 0, from the thread.
        self.on_interrupt: Callable[[str], None] = lambda _: None
        self._interrupted = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def start(self, on_stop: Callable[[str], None]) -> None:
        """Start beating.

        Args:
            on_stop: called once on rank 0, from the thread, with the reason, when a follower was asked to stop.
        """
        self._on_stop = on_stop
        self._thread.start()

    def end(self) -> None:
        """Stop beating and watching: the ranks end in order."""
        self._ended.set()

    def ask_to_stop(self, why: str) -> None:
        """On a follower: ask rank 0 to stop the trainer. Raises: RuntimeError: the store is gone."""
        self._store.set("stop", why)

    def interrupt(self, round_id: str) -> None:
        """On rank 0: end the waits of the others in a round, within BEAT_S. Raises: RuntimeError: the store is gone."""
        self._store.set("interrupt", round_id)

    def report(self, error: BaseException) -> None:
        """Report why this rank ends. Raises: RuntimeError: rank 0 is lost, or does not answer within GRACE_S."""
        left: Future[None] = Future()
        # In a thread of its own: calls to the store of a frozen rank 0 have no deadline.
        threading.Thread(target=self._write_report, args=(error, left), name="failure report", daemon=True).start()
        try:
            left.result(GRACE_S)
        except TimeoutError:
            raise RuntimeError(f"rank 0 has not answered for {GRACE_S:g} s") from None

    def _write_report(self, error: BaseException, left: Future[None]) -> None:
        try:
            order = self._store.add("failures", 1)
            text = {"order": order, "error": f"{type(error).__name__}: {error}"}
            self._store.set(f"failure/{self._rank}", json.dumps(text))
        except RuntimeError as failure:
            left.set_exception(failure)
        else:
            left.set_result(None)

    def diagnose(self, error: BaseException) -> str:
        """On rank 0, after an error: find out which rank failed first, and why.

        Takes SILENT_S, unless all other ranks have reported before; twice that if several are silent, because some of
        them may only be slow.
        """
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        before, begun_s = self._beats(others), time.monotonic()
        while True:
            lasted_s = time.monotonic() - begun_s
            reports, after = self._reports(others), self._beats(others)
            silent = [rank for rank in others if rank not in reports and after[rank] == before[rank]]
            if len(reports) == len(others) or lasted_s >= (SILENT_S if len(silent) < 2 else 2 * SILENT_S):
                break
            time.sleep(BEAT_S / 5)
        if silent:
            names = ", ".join(f"rank {rank}" for rank in silent)
            return f"{names}: killed or hanging, without a report; seen here as {type(error).__name__}: {error}"
        if reports:
            first = min(reports, key=lambda rank: reports[rank][0])
            return f"rank {first}: {reports[first][1]}"
        return f"rank {self._rank}: {type(error).__name__}: {error}"

    def _beats(self, ranks: list[int]) -> dict[int, int]:
        return {rank: self._store.add(f"beat/{rank}", 0) for rank in ranks}

    def _reports(self, ranks: list[int]) -> dict[int, tuple[int, str]]:
        found = {}
        for rank in ranks:
            if self._store.check([f"failure/{rank}"]):
                report = json.loads(self._store.get(f"failure/{rank}"))
                found[rank] = (int(report["order"]), str(report["error"]))
        return found

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._store.add(f"beat/{self._rank}", 1)
                if self._rank == 0 and self._store.check(["stop"]):
                    self._on_stop(self._store.get("stop").decode())
                    self._on_stop = lambda _: None
                self._poll_interrupt()
                failed = self._store.add("failures", 0) > 0
            except RuntimeError as error:
                self._end_process(f"rank 0 is lost: {error}")
                return
            if failed:
                self._end_process("a rank has failed")
                return

    def _poll_interrupt(self) -> None:
        if self._rank == 0 or not self._store.check(["interrupt"]):
            return
        round_id = self._store.get("interrupt").decode()
        if round_id != self._interrupted:
            self._interrupted = round_id
            self.on_interrupt(round_id)

    def _end_process(self, why: str) -> None:
        """End this process after GRACE_S, in which the torch thread may fail by itself with a better error."""
        if self._ended.wait(GRACE_S):
            return
        if self._rank == 0:  # the store is in this process: it answers
            reports = self._reports(list(range(self._world_size)))
            first = min(reports, key=lambda rank: reports[rank][0], default=None)
            why = why if first is None else f"rank {first}: {reports[first][1]}"
            record_failure(ROLE, failure_name(0), why)
        log.error("trainer rank ends", rank=self._rank, error=why)
        os._exit(EXIT_FAILED)
