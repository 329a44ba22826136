"""The fleet as status calls report it: serving replicas and troubles. Exists before the services are found."""

from typing import Protocol

from coordinator.fleet.base import Fleet


class HasTroubles(Protocol):
    """Reports troubles (fleet.kubernetes.cluster.Cluster)."""

    def troubles(self) -> list[str]:
        """Return the present troubles, a sentence each."""
        ...


class FleetView:
    """Serving replicas and troubles for status calls; `fleet` is set when the run has found its services."""

    def __init__(self, cluster: HasTroubles | None = None) -> None:
        self.fleet: Fleet | None = None
        self._cluster = cluster

    def serving(self) -> list[str]:
        """Return the names of the replicas that get work."""
        return [] if self.fleet is None else [replica.name for replica in self.fleet.serving()]

    def troubles(self) -> list[str]:
        """Return the present troubles, a sentence each."""
        return [] if self._cluster is None else self._cluster.troubles()
