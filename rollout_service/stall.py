"""Notices that an engine stands still, and ends its service, as the death of a rank does.

A process that ends is started again by whoever runs it (launcher, compose, kubelet). Its calls fail, so that their
completions continue on other replicas. An engine that is frozen, by a hung kernel or a stopped process, does neither.

what stands still                  while                                                  is lost after
tokens computed, groups finished   groups run and the engine is not paused                stall_timeout_s
the same                           it may be slow: no group was ever finished on a GPU    PATIENCE x stall_timeout_s
                                   (kernels are compiled), or all ranks use their CPUs
answers of a rank's process        always: it has answered when the engine started        stall_timeout_s

Time in which this process did not run itself (a host that was suspended) does not count.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollout_service.engine import EngineLoad, EngineProcesses
from rollout_service.weight_updates.admission import Admission
from servicekit.errors import Unavailable
from servicekit.lifecycle.tasks import cancel
from servicekit.logs import get_logger

# Between two looks; a tenth of a shorter timeout.
LOOK_S = 1.0
# How much longer an engine may be silent that is probably at work: 600 s by default, e.g. for kernels of a new model.
PATIENCE = 10.0
# Share of a core from which on a rank computes: the threads of one that waits take 0.001 for their leases.
COMPUTES = 0.02
# Time for the running calls to bring their error to the callers.
REPLY_S = 1.0

T = TypeVar("T")
log = get_logger(__name__)


class SingleFlight(Generic[T]):
    """A question of which one at a time is under way, whoever asks: if it hangs, it holds one thread and not many."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """Wait for the answer that is under way, or ask. Raises: what asking raises."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="ask")
        return await asyncio.shield(self._asking)

    async def end(self) -> None:
        """Give up the question that is under way."""
        if self._asking is not None:
            await cancel(self._asking)

    async def within(self, timeout_s: float) -> T | None:
        """Take the newest answer, or ask. Returns: None: it has not come within timeout_s, or asking failed."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="ask")
        asking = self._asking
        await asyncio.wait({asking}, timeout=timeout_s)
        if not asking.done():
            return None
        self._asking = None
        return None if asking.cancelled() or asking.exception() is not None else asking.result()


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is seen of an engine.

    Attributes:
        running_groups: groups for which calls wait.
        paused: by a weight sync, or by hand.
        progress: a number that changes when tokens are computed or groups finished; None: the engine does not tell it.
        may_be_slow: what the table above says.
        answered: of each rank here, whether its process has answered since the last look.
    """

    running_groups: int = 0
    paused: bool = False
    progress: int | None = 0
    may_be_slow: bool = False
    answered: tuple[bool, ...] = ()


class Stillness:
    """For how long what should move has stood still; times are arguments."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._limit_s = stall_timeout_s
        self._progress: int | None = None
        self._still_s = 0.0  # without progress, and with no reason to be slow
        self._idle_s = 0.0  # without progress
        self._silent_s: dict[int, float] = {}  # by rank

    def observe(self, look: Look, elapsed_s: float) -> str:
        """Add a look, `elapsed_s` after the one before. Returns: what stands still and for how long; "": nothing."""
        moved = look.progress is not None and look.progress != self._progress
        if moved:
            self._progress = look.progress
        if moved or look.paused:
            self._still_s = self._idle_s = 0.0
        elif look.running_groups:  # neither calls that come nor calls that are given up make it move
            self._idle_s += elapsed_s
            self._still_s = 0.0 if look.may_be_slow else self._still_s + elapsed_s
        if self._still_s >= self._limit_s or self._idle_s >= PATIENCE * self._limit_s:
            return f"computed no token for {self._idle_s:.0f} s while {look.running_groups} groups ran"
        return self._silence(look.answered, elapsed_s)

    def _silence(self, answered: Sequence[bool], elapsed_s: float) -> str:
        for rank, has in enumerate(answered):
            if has:
                self._silent_s[rank] = 0.0
            else:
                self._silent_s[rank] = self._silent_s.get(rank, 0.0) + elapsed_s
        longest_s = max(self._silent_s.values(), default=0.0)
        return f"has a rank that has not answered for {longest_s:.0f} s" if longest_s >= self._limit_s else ""


class StallWatch:
    """Watches one host's part of an engine; on a further host of an engine, whose calls the leader has, its ranks only.

    Args:
        pings: one for each rank of this host: whether its process answers.
        admission: running calls. None: they are not here.
        load: asks the engine for its load.
        finished: counts what calls were given.
        paused: whether the engine is paused.
    """

    def __init__(
        self,
        name: str,
        processes: EngineProcesses,
        pings: Sequence[Callable[[], Coroutine[Any, Any, bool]]],
        stall_timeout_s: float,
        *,
        admission: Admission | None = None,
        load: SingleFlight[EngineLoad] | None = None,
        finished: Callable[[], int] = lambda: 0,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name, self._processes, self._limit_s = name, processes, stall_timeout_s
        self._admission, self._load, self._finished, self._paused = admission, load, finished, paused
        self._pings = [SingleFlight(ping) for ping in pings]
        self._cpu_s: tuple[float, ...] = processes.cpu_s()

    async def run(self) -> None:
        """Look again and again. Raises: Unavailable: it stands still; its calls have ended, and it counts as failed."""
        try:
            await self._until_still()
        except Exception as error:
            if not self._processes.failed.done():
                self._processes.failed.set_exception(error)
            raise
        finally:
            for ping in self._pings:
                await ping.end()

    async def _until_still(self) -> None:
        interval_s = min(LOOK_S, self._limit_s / 10)
        stillness, before_s = Stillness(self._limit_s), time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            # What lies beyond is time in which this process did not run.
            elapsed_s = min(time.monotonic() - before_s, 3 * interval_s)
            before_s = time.monotonic()
            why = stillness.observe(await self._look(elapsed_s, interval_s), elapsed_s)
            if why:
                await self._give_up(Unavailable(f"the engine of {self._name} {why} (rollout.stall_timeout_s)"))

    async def _look(self, elapsed_s: float, timeout_s: float) -> Look:
        *answers, load = await asyncio.gather(*(ping.within(timeout_s) for ping in self._pings), self._read(timeout_s))
        finished = self._finished()
        return Look(
            running_groups=0 if self._admission is None else self._admission.running_groups,
            paused=self._paused(),
            progress=None if load is None else load + finished,
            may_be_slow=self._computes(elapsed_s) if self._cpu_s else finished == 0,
            answered=tuple(answer is True for answer in answers),
        )

    async def _read(self, timeout_s: float) -> int | None:
        load = None if self._load is None else await self._load.within(timeout_s)
        return None if load is None else load.progress

    def _computes(self, elapsed_s: float) -> bool:
        """Whether every rank has used its CPUs since the last look."""
        before, self._cpu_s = self._cpu_s, self._processes.cpu_s()
        return all(now - then >= COMPUTES * elapsed_s for then, now in zip(before, self._cpu_s, strict=True))

    async def _give_up(self, error: Unavailable) -> None:
        log.error("engine stands still", error=str(error))
        if self._admission is not None:
            self._admission.evict(error)
            await self._admission.wait_idle(REPLY_S)
        raise error
