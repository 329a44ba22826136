"""A fleet that follows the registry: lost replicas leave it, replicas that return are new ones."""

import asyncio
from collections.abc import Sequence

from servicekit.logs import get_logger
from servicekit.redis.records import Failure, ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.security.tls import Identity
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer

ROLLOUT_ROLE, TRAINER_ROLE = "rollout", "trainer"

log = get_logger(__name__)


class WatchedFleet:
    """Follows the registry; also moves the trainer's client to the trainer's present address.

    A replica's incarnation is its record's worker_id.

    Args:
        identity: the TLS identity for calls to replicas.
    """

    def __init__(self, registry: Registry, trainer: Trainer, identity: Identity | None = None) -> None:
        self._registry = registry
        self._trainer = trainer
        self._identity = identity
        self._known: dict[str, Replica] = {}  # by worker_id
        self._serving: tuple[Replica, ...] = ()
        self._failures: list[Failure] = []
        self._gone: list[Replica] = []  # lost, but still generating: closing the channel would end that call
        self._looking = asyncio.Lock()  # a look that is older than another one must not undo it
        self._last: dict[str, Replica] = {}  # by name, the one that was lost last

    async def look(self) -> tuple[Replica, ...]:
        """Read the announced replicas, and move the trainer's client. Raises: Unavailable: Redis does not answer."""
        async with self._looking:
            return await self._look()

    async def _look(self) -> tuple[Replica, ...]:
        rollouts, trainers, self._failures, names = await asyncio.to_thread(self._read)
        self._trainer.announced = trainers[-1].address if trainers else ""
        for record in trainers:
            await self._trainer.move_to(record.address)
        for record in rollouts:
            if record.worker_id not in self._known:
                self._known[record.worker_id] = Replica(record.name, record.address, self._identity)
                log.info("replica found", replica=record.name, address=record.address)
        await self._forget({record.worker_id for record in rollouts}, names)
        for one in self._failures:
            if one.role == ROLLOUT_ROLE and (gone := self._last.get(one.name)) is not None:
                gone.left, gone.why = False, one.reason
        return tuple(self._known[record.worker_id] for record in rollouts)

    async def still_announced(self) -> tuple[Replica, ...]:
        """Read which replicas of the last look() are announced now; changes nothing.

        Raises: Unavailable: Redis does not answer.
        """
        records = await asyncio.to_thread(self._registry.list, ROLLOUT_ROLE)
        return tuple(self._known[record.worker_id] for record in records if record.worker_id in self._known)

    def _read(self) -> tuple[list[ServiceRecord], list[ServiceRecord], list[Failure], set[str]]:
        rollouts, trainers = self._registry.list(ROLLOUT_ROLE), self._registry.list(TRAINER_ROLE)
        return rollouts, trainers, self._registry.failures(), self._registry.names(ROLLOUT_ROLE)

    def troubles(self) -> list[str]:
        """Return why each replica ended that has not come back, and when."""
        return [str(failure) for failure in self._failures if failure.role == ROLLOUT_ROLE]

    async def _forget(self, announced: set[str], names: set[str]) -> None:
        for worker_id in self._known.keys() - announced:
            gone = self._known.pop(worker_id)
            gone.left = gone.name not in names  # it has withdrawn its record, and no other has taken its name
            self._last[gone.name] = gone
            self._serving = tuple(replica for replica in self._serving if replica is not gone)
            self._gone.append(gone)
            log.warning("replica lost", replica=gone.name)
        for replica in [replica for replica in self._gone if not replica.is_generating]:
            self._gone.remove(replica)  # one at a time: a look that is cancelled leaves the others to the next one
            await replica.close()

    def serving(self) -> tuple[Replica, ...]:
        """Return the replicas that get work."""
        return self._serving

    def admit(self, replicas: Sequence[Replica]) -> None:
        """Give work to these replicas from now on, and to no others."""
        before, now = {replica.name for replica in self._serving}, {replica.name for replica in replicas}
        if before != now:
            log.info("fleet changed", joined=sorted(now - before), left=sorted(before - now), serving=sorted(now))
        self._serving = tuple(replicas)

    async def close(self) -> None:
        """Close the channels."""
        for replica in (*self._known.values(), *self._gone):
            await replica.close()
