"""Replicas that join during a dispatch: they are seeded with the version that it samples.

The trainer is idle while a dispatch runs (schedule/sync.py), and a round of the joiners alone does not touch replicas
that generate (weight_sync.py). A seeding that has begun is awaited even when the dispatch no longer needs it, so that
it cannot overlap with the next round; it has deadlines of its own.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coordinator.sync.publish_attempt import is_retriable
from servicekit.errors import DeadlineExceeded, TandemError
from servicekit.lifecycle.tasks import cancel
from servicekit.logs import get_logger

# Brings a version to replicas that are present and do not serve it; the others are not interrupted.
Seed = Callable[[int], Awaitable[object]]

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a dispatch waits for replicas.

    Attributes:
        probe_s: a replica that does not answer a status call for so long is lost (sync.probe_timeout_s).
        rejoin_s: for a replica to join when none is left (rollout.rejoin_timeout_s).
        is_queued: whether replicas are held in a queue: the time to join does not run while they are.
        look_s: between two looks for joiners: a replica takes seconds to start, a look costs two reads of Redis.
    """

    probe_s: float = 10.0
    rejoin_s: float = 0.0
    is_queued: Callable[[], bool] = lambda: False
    look_s: float = 1.0


class Joiners:
    """Looks for replicas that join one dispatch, and seeds them.

    Args:
        seed: None: the trainer seeds none; replicas may, without being asked (WeightSync.run_seeding).
        is_enough: whether a replica can take work now.
    """

    def __init__(
        self, seed: Seed | None, policy_version: int, is_enough: Callable[[], bool], *, interval_s: float
    ) -> None:
        self._seed, self._policy_version, self._is_enough = seed, policy_version, is_enough
        self._interval_s = interval_s
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""

    def look(self) -> "asyncio.Task[None] | None":
        """Start looking for joiners, if not started yet.

        Returns: the task, which ends when a replica has joined; None: none can. The task raises TandemError if no
            replica serves and seeding fails in a way that another try would not mend.
        """
        if self._seed is None:
            return None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._seed_until_enough(self._seed), name="joiners")
        return self._task

    async def _seed_until_enough(self, seed: Seed) -> None:
        while not self._over.is_set():
            try:
                await seed(self._policy_version)
            except TandemError as error:
                # A DeadlineExceeded means that the seeding itself has waited for replicas or the trainer long enough.
                if isinstance(error, DeadlineExceeded) or not is_retriable(error):
                    raise
                self._note(str(error))
            if self._is_enough():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._over.wait()

    def _note(self, complaint: str) -> None:
        """Log a complaint once, not at every look."""
        if complaint != self._complaint:
            log.warning("no replica could be seeded", error=complaint)
        self._complaint = complaint

    async def end(self) -> None:
        """Stop looking. Wait for a seeding that has begun; its errors do not matter any more."""
        self._over.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def drop(self) -> None:
        """Stop looking and cancel a seeding that has begun: the run is over, or the dispatch has failed."""
        if self._task is not None:
            await cancel(self._task)
