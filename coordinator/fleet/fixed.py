"""A fleet that does not change: replicas that all serve, until they fail."""

from collections.abc import Sequence

from coordinator.clients.replica import Replica


class FixedFleet:
    """These replicas and no others; all of them serve.

    Args:
        replicas: by name.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)

    async def look(self) -> tuple[Replica, ...]:
        """Return all replicas."""
        return self._replicas

    def serving(self) -> tuple[Replica, ...]:
        """Return all replicas."""
        return self._replicas

    def admit(self, replicas: Sequence[Replica]) -> None:
        """Refuse: none can join, and none leaves."""
        raise NotImplementedError("the replicas of a fixed fleet serve from the start")
