"""The fleet as others may see it: who serves, and what is wrong. There before the services are found."""

from typing import Protocol

from coordinator.fleet.base import Fleet


class HasTroubles(Protocol):
    """Something that may be wrong (fleet.kubernetes.cluster.Cluster)."""

    def troubles(self) -> list[str]:
        """What is wrong now, a sentence each."""
        ...


class FleetView:
    """Read by the coordinator's own service; filled in as the run finds its services."""

    def __init__(self, cluster: HasTroubles | None = None) -> None:
        self.fleet: Fleet | None = None
        self._cluster = cluster

    def serving(self) -> list[str]:
        """Names of the replicas that get work."""
        return [] if self.fleet is None else [replica.name for replica in self.fleet.serving()]

    def troubles(self) -> list[str]:
        """What is wrong now, in words."""
        return [] if self._cluster is None else self._cluster.troubles()
