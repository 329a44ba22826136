"""The interface of a fleet of rollout replicas.

    announced  it is in the registry                            look()
    serving    it has committed the current policy: gets work   serving(), admit()

A replica that restarts is a new `Replica` of the same name: knowledge of the old process is not applied to the new one.
"""

from collections.abc import Sequence
from typing import Protocol

from tandem_clients.replica import Replica

# Between two looks while services are missing: they take seconds to start.
LOOK_INTERVAL_S = 0.1


class Fleet(Protocol):
    """The rollout replicas of a run."""

    async def look(self) -> tuple[Replica, ...]:
        """Read the announced replicas, by name; one that is no longer announced stops serving.

        Raises: Unavailable: the registry does not answer.
        """
        ...

    def serving(self) -> tuple[Replica, ...]:
        """Return the replicas that get work, by name."""
        ...

    def admit(self, replicas: Sequence[Replica]) -> None:
        """Give work to these replicas from now on, and to no others."""
        ...


class FixedFleet:
    """A fleet that does not change: these replicas and no others, which all serve until they fail.

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
