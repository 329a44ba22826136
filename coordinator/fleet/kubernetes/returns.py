"""A trainer that is lost in the middle of a run: does the cluster bring it back?

its pods, from the error on            the run
ended, replaced, started again         waits until they are ready, and goes on from its newest checkpoint
dead                                   ends: a person must act
as before, and the trainer answers     ends: the error was about something else
as before, and no answer for long      ends

A pod's state follows what happened by a moment (its container ended) to a minute (its node is gone).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from coordinator.fleet.kubernetes.api.pods import TRAINER, Fate
from coordinator.fleet.kubernetes.arrivals import LOOK_INTERVAL_S, TrainerDead, trainer_fate
from coordinator.fleet.kubernetes.cluster import Cluster
from servicekit.errors import Aborted, DeadlineExceeded, NotReady, PeerLost, TandemError, Unavailable, WrongVersion
from servicekit.logs import get_logger
from weightsync.group.rendezvous import Evicted

# What a run may fail with because its trainer is another one, or none; anything else would fail again.
_LOSSES = (Aborted, DeadlineExceeded, NotReady, PeerLost, Unavailable, WrongVersion)
# For the news of a pod's end to come, while the trainer's first rank still answers.
NEWS_S = 5.0

log = get_logger(__name__)


class TrainerGuard:
    """Knows the trainer's pods as they were when the run was started with them.

    Args:
        answers: whether the trainer says how it is.
    """

    def __init__(
        self, cluster: Cluster, answers: Callable[[], Awaitable[bool]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster, self._answers, self._clock = cluster, answers, clock
        self._before = self._incarnations()

    async def wait_for_return(self, error: TandemError) -> None:
        """Returns once there is another trainer in the place of the one that was lost by `error`.

        Raises: `error` itself: it was not lost; TrainerDead, DeadlineExceeded: it does not come back; both say why.
        """
        if not isinstance(error, _LOSSES) or isinstance(error, Evicted) or not await self._is_lost():
            raise error
        told = trainer_fate(self._cluster.pods.pods)[1]
        self._cluster.noted.note("trainer", f"the trainer was lost ({told or 'its pods are other ones'}): {error}")
        timeout_s = self._cluster.settings.reschedule_timeout_s
        deadline_s = self._clock() + timeout_s
        while True:
            self._cluster.look()
            fate, told = trainer_fate(self._cluster.pods.pods)
            if fate is Fate.UP:
                break
            if fate is Fate.DEAD:
                raise TrainerDead(f"the trainer is dead, waiting would not help: {told}; lost by: {error}") from error
            if self._clock() >= deadline_s:
                raise DeadlineExceeded(f"waited {timeout_s:g} s for the trainer: {told}; lost by: {error}") from error
            await asyncio.sleep(LOOK_INTERVAL_S)
        self._cluster.noted.note("trainer", "")

    async def _is_lost(self) -> bool:
        """Whether its pods say so before there is reason to believe the opposite."""
        begun_s = self._clock()
        while not self._has_changed():
            patience_s = NEWS_S if await self._answers() else self._cluster.settings.unready_after_s
            if self._clock() - begun_s >= patience_s or not self._cluster.pods.is_current:
                return False
            await asyncio.sleep(LOOK_INTERVAL_S)
        return True

    def _has_changed(self) -> bool:
        fate, _ = trainer_fate(self._cluster.pods.pods)
        return self._cluster.pods.is_current and (fate is not Fate.UP or self._incarnations() != self._before)

    def _incarnations(self) -> set[tuple[str, int]]:
        return {pod.incarnation for pod in self._cluster.pods.pods if pod.component == TRAINER}
