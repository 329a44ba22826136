"""A fleet whose replicas can be lent: to all others such a replica is not announced and does not serve.

It finishes what it generates, gets nothing new, and takes no part in weight syncs. Given back, it joins with the next
one.
"""

from collections.abc import Sequence

from coordinator.watch.life import Life
from servicekit.errors import Unavailable
from tandem_clients.fleet import Fleet
from tandem_clients.replica import Replica


class LendingFleet:
    """A fleet without the replicas that are lent.

    Args:
        keep: so many serving replicas are not lent.
        lent: emptied: those that are, changed here, and read by whoever shows the fleet.
        life: notes a registry that does not answer.
    """

    def __init__(self, fleet: Fleet, *, keep: int, lent: set[Replica], life: Life | None = None) -> None:
        self._fleet, self._keep, self._lent, self._life = fleet, keep, lent, life or Life()
        lent.clear()  # an attempt that was cancelled may have left some, which no one would give back

    async def look(self) -> tuple[Replica, ...]:
        """Read the announced replicas. Raises: Unavailable: the registry does not answer."""
        try:
            announced = await self._fleet.look()
        except Unavailable as error:
            self._life.note("redis lost", str(error))
            raise
        self._life.note("redis back", "it answers")
        return self._without(announced)

    def serving(self) -> tuple[Replica, ...]:
        """Return the replicas that get work, by name."""
        return self._without(self._fleet.serving())

    def admit(self, replicas: Sequence[Replica]) -> None:
        """Give work to these replicas from now on, and to no others."""
        self._fleet.admit(replicas)

    def lend(self, most: int) -> tuple[Replica, ...]:
        """Lend so many serving replicas at most; none: all others are needed."""
        serving = self.serving()
        lent = serving[max(self._keep, len(serving) - most) :]
        self._lent.update(lent)
        return lent

    def give_back(self, replicas: Sequence[Replica]) -> None:
        """Take lent replicas back."""
        self._lent.difference_update(replicas)

    def _without(self, replicas: Sequence[Replica]) -> tuple[Replica, ...]:
        return tuple(replica for replica in replicas if replica not in self._lent)
