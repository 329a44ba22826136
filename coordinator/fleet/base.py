"""What the coordinator asks of a fleet of rollout replicas.

    announced  it is there                                      look()
    serving    it has committed the current policy: gets work   serving(), admit()

A replica that ends comes back as a new `Replica` (same name, new process), so that nothing known of the old one is
believed of the new one.
"""

from collections.abc import Sequence
from typing import Protocol

from coordinator.clients.replica import Replica

# Between two looks at a fleet that is not complete: services take seconds to come back.
LOOK_INTERVAL_S = 0.1


class Fleet(Protocol):
    """The rollout replicas of a run."""

    async def look(self) -> tuple[Replica, ...]:
        """Replicas that are announced now, by name; one that is not any more serves no longer.

        Raises: Unavailable: the registry does not answer.
        """
        ...

    def serving(self) -> tuple[Replica, ...]:
        """Replicas that get work, by name."""
        ...

    def admit(self, replicas: Sequence[Replica]) -> None:
        """From now on these serve, and no others."""
        ...
