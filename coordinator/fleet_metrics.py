"""Metrics of the fleet as the coordinator sees it: who is there, who serves, who has come back as a new process."""

import weakref
from collections.abc import Sequence

from coordinator import metrics
from coordinator.replica import Replica


class FleetMetrics:
    """Compares one look at the fleet with those before; a replica that is a new process is a new `Replica`."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._names: set[str] = set()

    def observe(self, announced: Sequence[Replica], serving: Sequence[Replica]) -> None:
        """One look. Series of replicas that are gone end, so that nobody waits for their version to advance."""
        for replica in announced:
            if replica not in self._seen:
                self._seen.add(replica)
                metrics.REPLICA_STARTS.labels(replica=replica.name).inc()
        names = {replica.name for replica in announced}
        for gone in self._names - names:
            metrics.forget_replica(gone)
        self._names = names
        metrics.ANNOUNCED_REPLICAS.set(len(announced))
        metrics.SERVING_REPLICAS.set(len(serving))
