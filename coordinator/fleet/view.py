"""The fleet as status calls report it: serving replicas and troubles. Exists before the services are found."""

from collections.abc import Callable, Collection
from typing import Protocol

from tandem_clients.fleet import Fleet
from tandem_clients.replica import Replica
from tandem_clients.watched_fleet import WatchedFleet


class TroubleSource(Protocol):
    """Reports troubles."""

    def troubles(self) -> list[str]:
        """Return the present troubles, a sentence each."""
        ...


class HasTroubles(TroubleSource, Protocol):
    """Reports troubles (fleet.kubernetes.cluster.Cluster), and the pods of replicas."""

    def num_replicas(self) -> int | None:
        """Return how many replicas have pods, pending ones included; None: unknown. Called from any thread."""
        ...


class FleetView:
    """Serving replicas and troubles for status calls; `fleet` is set when the run has found its services.

    Args:
        replicas: returns how many replicas there should be, where no cluster says it.
        lent: replicas that evaluate apart, which get work too.
    """

    def __init__(
        self,
        cluster: HasTroubles | None = None,
        replicas: Callable[[], int] = lambda: 0,
        lent: Collection[Replica] = (),
    ) -> None:
        self.fleet: Fleet | None = None
        # Replicas that are announced and take no part (sync.left_out.LeftOut).
        self.left_out: TroubleSource | None = None
        self.replicas, self._cluster, self._lent = replicas, cluster, lent

    def serving(self) -> list[str]:
        """Return the names of the replicas that get work."""
        return [] if self.fleet is None else sorted({one.name for one in (*self.fleet.serving(), *self._lent)})

    def expected(self) -> int:
        """Return how many replicas there should be. Called from any thread."""
        in_cluster = None if self._cluster is None else self._cluster.num_replicas()
        return self.replicas() if in_cluster is None else in_cluster

    def troubles(self) -> list[str]:
        """Return the present troubles, a sentence each."""
        lost = self.fleet if isinstance(self.fleet, WatchedFleet) else None  # in a cluster, those of its pods
        sources = (lost if self._cluster is None else self._cluster, self.left_out)
        return [trouble for source in sources if source is not None for trouble in source.troubles()]
