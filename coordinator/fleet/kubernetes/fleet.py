"""A fleet of pods: the registry says who serves where, the API server who is leaving.

pod                         replica
there                       as the registry says: found, seeded, given work
leaving (deleted, evicted)  drained: no new work, no part in a round; what it generates it may finish
gone                        gone at once, though its lease outlives it
not ready for long          seeded again before it gets work (keeper.py)
not known: API away         as the registry says

A replica has its pod's name.
"""

from collections.abc import Sequence
from typing import Protocol

from coordinator.fleet.kubernetes.pods import Pod
from coordinator.fleet.watched import WatchedFleet
from coordinator.replica import Replica
from servicekit.logs import get_logger

log = get_logger(__name__)


class Pods(Protocol):
    """The run's pods as known now (watch.PodWatch)."""

    @property
    def pods(self) -> Sequence[Pod]: ...

    @property
    def is_current(self) -> bool: ...


class KubernetesFleet:
    """The replicas of `watched` whose pods stay."""

    def __init__(self, watched: WatchedFleet, pods: Pods) -> None:
        self._watched, self._pods = watched, pods
        self._found: tuple[Replica, ...] = ()
        self._draining: set[Replica] = set()

    async def look(self) -> tuple[Replica, ...]:
        """Raises: Unavailable: Redis does not answer."""
        self._found = await self._watched.look()
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

    def members(self) -> dict[Replica, Pod]:
        """Those that the last look() found and that stay, with their pods."""
        pods = {pod.name: pod for pod in self._pods.pods}
        return {replica: pods[replica.name] for replica in self._staying(self._found) if replica.name in pods}

    async def close(self) -> None:
        """Close the channels."""
        await self._watched.close()

    def _staying(self, replicas: Sequence[Replica]) -> tuple[Replica, ...]:
        if not self._pods.is_current:
            return tuple(replicas)
        staying = {pod.name for pod in self._pods.pods if not pod.leaving}
        self._note({replica for replica in replicas if replica.name not in staying})
        return tuple(replica for replica in replicas if replica.name in staying)

    def _note(self, leaving: set[Replica]) -> None:
        """A line for each replica whose pod begins to leave."""
        self._draining &= set(self._found) | set(self._watched.serving())
        for replica in leaving - self._draining:
            log.info("replica leaves: no new work for it", replica=replica.name)
            self._draining.add(replica)
