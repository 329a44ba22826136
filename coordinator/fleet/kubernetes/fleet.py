"""A fleet of pods: the registry says who serves where, the API server who is leaving.

pod                         replica
there                       as the registry says: found, seeded, given work
leaving (deleted, evicted)  drained: no new work, no part in a round; what it generates it may finish
gone, or another one        gone at once, though its lease outlives it
not ready for long          seeded again before it gets work (keeper.py)
not known: API away         as the registry says

An engine of several pods is as its worst one (engines.py), and a replica has its pod's name, or its leader's. A set
makes the next pod under the name of the last one, so a record may be the last one's for as long as its lease runs on;
after that it is the next one's, which the watch was late to tell of.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from coordinator.clients.replica import Replica
from coordinator.fleet.kubernetes.api.pods import Pod
from coordinator.fleet.kubernetes.engines import engines
from coordinator.fleet.watched import WatchedFleet
from servicekit.logs import get_logger

log = get_logger(__name__)


class Pods(Protocol):
    """The run's pods as known now (watch.PodWatch)."""

    @property
    def pods(self) -> Sequence[Pod]:
        """The run's pods, as last seen."""
        ...

    @property
    def is_current(self) -> bool:
        """Whether the watch is up to date."""
        ...


class KubernetesFleet:
    """The replicas of `watched` whose pods stay.

    Args:
        lease_ttl_s: how long a record may outlive its process.
    """

    def __init__(
        self, watched: WatchedFleet, pods: Pods, *, lease_ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._watched, self._pods = watched, pods
        self._lease_ttl_s, self._clock = lease_ttl_s, clock
        self._found: tuple[Replica, ...] = ()
        self._draining: set[Replica] = set()
        self._uids: dict[Replica, str] = {}  # of the pod that a replica is taken to be in
        self._differs_since_s: dict[Replica, float] = {}  # since when the pod of its name is another one

    async def look(self) -> tuple[Replica, ...]:
        """Raises: Unavailable: Redis does not answer."""
        self._found = await self._watched.look()
        self._follow_late_news()
        return self._staying(self._found)

    def serving(self) -> tuple[Replica, ...]:
        """Replicas that get work; one whose pod is told to end leaves at once, between two calls."""
        return self._staying(self._watched.serving())

    def admit(self, replicas: Sequence[Replica]) -> None:
        """From now on these serve."""
        self._watched.admit(replicas)

    def demote(self, replica: Replica) -> None:
        """It gets no more work until it has been seeded again."""
        self._watched.admit([each for each in self._watched.serving() if each is not replica])

    async def members(self) -> dict[Replica, Pod]:
        """Those that the last look() found, that stay and are announced still, with their pods.

        Raises: Unavailable: Redis does not answer.
        """
        announced = await self._watched.still_announced()
        pods = {pod.name: pod for pod in engines(self._pods.pods)}
        return {replica: pods[replica.name] for replica in self._staying(announced) if replica.name in pods}

    async def close(self) -> None:
        """Close the channels."""
        await self._watched.close()

    def _staying(self, replicas: Sequence[Replica]) -> tuple[Replica, ...]:
        if not self._pods.is_current:
            return tuple(replicas)
        uids = self._uids_of_staying_pods()
        staying = tuple(
            r for r in replicas if r.name in uids and self._uids.setdefault(r, uids[r.name]) == uids[r.name]
        )
        self._note(set(replicas) - set(staying))
        return staying

    def _follow_late_news(self) -> None:
        """Who is announced for longer than a lease beside another pod of its name lives in that one."""
        if not self._pods.is_current:
            return
        uids, now_s = self._uids_of_staying_pods(), self._clock()
        differ = {
            r: uids[r.name] for r in self._found if r.name in uids and self._uids.get(r, uids[r.name]) != uids[r.name]
        }
        self._differs_since_s = {replica: self._differs_since_s.get(replica, now_s) for replica in differ}
        for replica, since_s in self._differs_since_s.items():
            if now_s - since_s > self._lease_ttl_s:
                self._uids[replica] = differ[replica]

    def _uids_of_staying_pods(self) -> dict[str, str]:
        """By name."""
        return {pod.name: pod.uid for pod in engines(self._pods.pods) if not pod.leaving}

    def _note(self, leaving: set[Replica]) -> None:
        """A line for each replica whose pod begins to leave."""
        known = set(self._found) | set(self._watched.serving())
        self._draining &= known
        self._uids = {replica: uid for replica, uid in self._uids.items() if replica in known}
        for replica in leaving - self._draining:
            log.info("replica leaves: no new work for it", replica=replica.name)
            self._draining.add(replica)
