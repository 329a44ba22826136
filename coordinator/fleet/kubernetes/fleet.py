"""A fleet of pods: the registry has the addresses of the replicas, the API server knows which ones leave.

pod                         replica
running                     as in the registry: found, seeded, given work
leaving (deleted, evicted)  drained: no new work, no part in a round; it may finish running generations
deleted, or replaced        lost immediately, though its lease outlives it
not ready for long          seeded again before it gets work (keeper.py)
unknown: API unreachable    as in the registry

An engine of several pods has the state of its worst one (engines.py), and a replica the name of its pod, or of its
leader. A set gives a new pod the name of the old one, so a record may be of the old pod until its lease expires; after
that it is of the new one, of which the watch was late to learn.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from coordinator.fleet.kubernetes.api.pods import Pod
from coordinator.fleet.kubernetes.pod_states import engines
from servicekit.logs import get_logger
from tandem_clients.replica import Replica
from tandem_clients.watched_fleet import WatchedFleet

log = get_logger(__name__)


class Pods(Protocol):
    """The run's pods (watch.PodWatch)."""

    @property
    def pods(self) -> Sequence[Pod]:
        """The run's pods, as last seen."""
        ...

    @property
    def is_current(self) -> bool:
        """Whether the watch is up to date."""
        ...


class KubernetesFleet:
    """The replicas of `watched` whose pods do not leave.

    Args:
        lease_ttl_s: seconds that a record may outlive its process.
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
        """Find the replicas whose pods do not leave. Raises: Unavailable: Redis does not answer."""
        self._found = await self._watched.look()
        self._adopt_new_pods()
        return self._staying(self._found)

    def serving(self) -> tuple[Replica, ...]:
        """Return the replicas that get work, without those whose pods leave."""
        return self._staying(self._watched.serving())

    def admit(self, replicas: Sequence[Replica]) -> None:
        """Give work to these replicas from now on."""
        self._watched.admit(replicas)

    def demote(self, replica: Replica) -> None:
        """Give a replica no more work until it has been seeded again."""
        self._watched.admit([other for other in self._watched.serving() if other is not replica])

    async def members(self) -> dict[Replica, Pod]:
        """Return the replicas of the last look() that do not leave and are still announced, with their pods.

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

    def _adopt_new_pods(self) -> None:
        """Assign a replica that is announced for longer than a lease beside a new pod of its name to that pod."""
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
        """Return the uids of the pods that do not leave, by name."""
        return {pod.name: pod.uid for pod in engines(self._pods.pods) if not pod.leaving}

    def _note(self, leaving: set[Replica]) -> None:
        """Log each replica whose pod begins to leave, and forget unknown replicas."""
        known = set(self._found) | set(self._watched.serving())
        self._draining &= known
        self._uids = {replica: uid for replica, uid in self._uids.items() if replica in known}
        for replica in leaving - self._draining:
            log.info("replica leaving", replica=replica.name)
            replica.left = True
            self._draining.add(replica)
