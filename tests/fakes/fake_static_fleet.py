"""A fleet that never changes: replicas at addresses that are given."""

from collections.abc import Sequence

from coordinator.clients.replica import Replica


class StaticFleet:
    """All of `replicas`, always; they serve from the start."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._serving = self._replicas

    async def look(self) -> tuple[Replica, ...]:
        """Everyone."""
        return self._replicas

    def serving(self) -> tuple[Replica, ...]:
        """Whom admit() was last called with."""
        return self._serving

    def admit(self, replicas: Sequence[Replica]) -> None:
        """From now on these serve."""
        self._serving = tuple(replicas)
