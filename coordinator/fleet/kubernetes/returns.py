"""Decides whether a run waits for a lost trainer, by what the cluster does with its pods.

its pods, from the error on            the run
ended, replaced, started again         waits until they are ready, and continues (ledger/returning.py), or resumes
queued                                 waits as long as they are queued
dead                                   ends: a person must act
unchanged, and the trainer answers     ends: the error had another cause
unchanged, and no answer for long      ends
unknown: API unreachable               continues when the trainer is announced, if it is silent, or was restarted

A pod's state follows an event after a moment (a container ended) to a minute (a node is lost).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from coordinator.fleet.kubernetes.api.pods import TRAINER, PodOutlook
from coordinator.fleet.kubernetes.arrivals import TrainerDead
from coordinator.fleet.kubernetes.cluster import Cluster
from servicekit.errors import Aborted, DeadlineExceeded, NotReady, PeerLost, TandemError, Unavailable, WrongVersion
from servicekit.logs import get_logger
from tandem_clients.fleet import LOOK_INTERVAL_S
from weightsync.membership.rendezvous import Evicted

# Errors that a lost or replaced trainer can cause; after any other one, another attempt would fail too.
_LOSSES = (Aborted, DeadlineExceeded, NotReady, PeerLost, Unavailable, WrongVersion)
# Seconds for the end of a pod to become known, while the trainer's first rank still answers.
NEWS_S = 5.0

log = get_logger(__name__)


class TrainerGuard:
    """Compares the trainer's pods with those at the start of the run.

    Args:
        answers: whether the trainer answers a status call.
    """

    def __init__(
        self, cluster: Cluster, answers: Callable[[], Awaitable[bool]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster, self._answers, self._clock = cluster, answers, clock
        self._before = self._incarnations()

    async def wait_for_return(self, error: TandemError) -> None:
        """Wait until the cluster has restarted the trainer that was lost with `error`.

        Raises: `error` itself: the trainer was not lost; TrainerDead, DeadlineExceeded: it does not return, and why.
        """
        if not isinstance(error, _LOSSES) or isinstance(error, Evicted) or not await self._is_lost(error):
            raise error
        await self._wait_until_up(error)

    async def _wait_until_up(self, error: TandemError) -> None:
        _, reason = self._cluster.trainer_outlook()
        self._cluster.noted.note("trainer", f"the trainer was lost ({reason or 'its pods were replaced'}): {error}")
        timeout_s = self._cluster.settings.reschedule_timeout_s
        deadline_s = self._clock() + timeout_s
        while True:
            self._cluster.look()
            await asyncio.to_thread(self._cluster.look_at_trainer_set)
            outlook, reason = self._cluster.trainer_outlook()
            if outlook is PodOutlook.UP or not self._cluster.pods.is_current:
                break
            if outlook is PodOutlook.DEAD:
                raise TrainerDead(f"the trainer is dead, waiting would not help: {reason}; lost by: {error}") from error
            if outlook is PodOutlook.QUEUED:
                deadline_s = self._clock() + timeout_s
            if self._clock() >= deadline_s:
                raise DeadlineExceeded(f"waited {timeout_s:g} s for the trainer: {reason}; lost by: {error}") from error
            await asyncio.sleep(LOOK_INTERVAL_S)
        self._before = self._incarnations()
        self._cluster.noted.note("trainer", "")

    async def _is_lost(self, error: TandemError) -> bool:
        """Whether the trainer's pods change before it has answered, or not answered, for long enough."""
        begun_s = self._clock()
        while not self._has_changed():
            answers = await self._answers()
            if not self._cluster.pods.is_current:
                return not answers or isinstance(error, WrongVersion)
            if self._clock() - begun_s >= (NEWS_S if answers else self._cluster.settings.unready_after_s):
                return False
            await asyncio.sleep(LOOK_INTERVAL_S)
        return True

    def _has_changed(self) -> bool:
        outlook, _ = self._cluster.trainer_outlook()
        return self._cluster.pods.is_current and (outlook is not PodOutlook.UP or self._incarnations() != self._before)

    def _incarnations(self) -> set[tuple[str, int]]:
        return {pod.incarnation for pod in self._cluster.pods.pods if pod.component == TRAINER}
