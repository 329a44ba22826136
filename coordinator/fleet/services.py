"""The services of a run: finds them in the registry, connects to them, collects their versions."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coordinator.fleet.arrivals import LeaseOutlook, Outlook, wait_for_enough
from coordinator.shutdown import TrainerLost
from servicekit.errors import DeadlineExceeded, NotReady, TandemError, Unavailable
from servicekit.lifecycle.tasks import cancel
from servicekit.lifecycle.termination import watch
from servicekit.logs import get_logger
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry, listens
from servicekit.security.tls import Identity
from servicekit.versions import software_versions
from tandem_api.common.v1 import common_pb2
from tandem_clients.fleet import LOOK_INTERVAL_S, Fleet
from tandem_clients.trainer import Trainer
from tandem_clients.watched_fleet import WatchedFleet
from tandem_config.schema import RunConfig

if TYPE_CHECKING:
    from coordinator.fleet.kubernetes.cluster import Cluster
    from coordinator.fleet.kubernetes.returns import TrainerGuard

log = get_logger(__name__)

_OWN_PACKAGES = ("tandem", "grpcio", "protobuf", "numpy", "tokenizers", "redis", "math-verify")


@dataclass(frozen=True, kw_only=True)
class Services:
    """Clients of the run's services.

    Attributes:
        guard: makes what decides whether a lost trainer comes back, by its pods; None: without a cluster.
        startup_timeout_s: for a trainer that starts again.
        lease_ttl_s: for which a service that was killed stays announced; another program may have its address by then.
    """

    trainer: Trainer
    fleet: Fleet
    guard: "TrainerGuard | None" = None
    startup_timeout_s: float = 0.0
    lease_ttl_s: float = 0.0

    async def trainer_answers(self) -> bool:
        """Whether the trainer answers a status call."""
        try:
            await self.trainer.status()
        except TandemError:
            return False
        return True

    async def raise_if_trainer_lost(self, error: TandemError) -> None:
        """Find out whether a lost trainer caused `error`. Raises: TrainerLost: the trainer does not answer."""
        if not await self.trainer_answers():
            raise TrainerLost(f"{error}; the trainer does not answer") from error

    async def until_back(self, error: TandemError) -> None:
        """Wait until the trainer that was lost with `error` answers again.

        Raises: TrainerLost: it does not come back, or is frozen, so that no one starts it; as guard.wait_for_return.
        """
        if self.guard is not None:
            await self.guard.wait_for_return(error)
        else:
            address = self.trainer.address
            try:
                await self.trainer.status()
            except (DeadlineExceeded, Unavailable) as silent:
                # The kernel accepts connections for a frozen process.
                takes = isinstance(silent, DeadlineExceeded) or bool(await asyncio.to_thread(listens, address))
                if takes and address == self.trainer.address:  # else it is announced at another one meanwhile
                    raise TrainerLost(f"{error}; the trainer does not answer: {silent}") from error
            except TandemError:
                pass
        try:
            await self.wait_for_trainer(self.startup_timeout_s)
        except TandemError as gone:
            raise TrainerLost(f"{error}; waited {self.startup_timeout_s:g} s for another: {gone}") from error

    async def wait_for_trainer(self, timeout_s: float) -> None:
        """Wait until the trainer answers: a killed one stays in the registry until its lease has run out.

        Raises: TandemError: the error of its last status call, after timeout_s, or of a trainer that is announced for
            longer than one that was killed.
        """
        deadline_s = time.monotonic() + timeout_s
        address, announced_s = "", 0.0
        while True:
            try:
                await self.fleet.look()  # moves the trainer's client to where the trainer is announced now
                if address != self.trainer.announced:
                    address, announced_s = self.trainer.announced, time.monotonic()
                await self.trainer.status()
                return
            except TandemError as error:
                passes = isinstance(error, (Unavailable, DeadlineExceeded, NotReady)) or not address
                stays_until_s = deadline_s if passes else min(deadline_s, announced_s + self.lease_ttl_s)
                if time.monotonic() >= stays_until_s:
                    raise
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def versions(self) -> dict[str, str]:
        """Ask all services for their software versions."""
        found = {self.trainer.name: dict((await self.trainer.status()).versions.packages)}
        for replica in await self.fleet.look():
            try:
                found[replica.name] = dict((await replica.status()).versions.packages)
            except TandemError as error:  # the first round will notice a lost replica
                log.warning("replica versions unknown", replica=replica.name, error=str(error))
        return merge_versions(found)


async def find_services(
    config: RunConfig,
    registry: Registry,
    identity: Identity | None,
    stack: AsyncExitStack,
    cluster: "Cluster | None" = None,
    fence: common_pb2.CoordinatorFence | None = None,
    *,
    wanted: Callable[[], int],
    resumed: bool = False,
    others_s: float = math.inf,
) -> Services:
    """Wait until trainer and replicas have announced themselves, and open channels to them, as `identity`.

    Args:
        cluster: the cluster of a fleet of pods, which it watches already.
        fence: the coordinator's, for calls to the trainer.
        wanted: returns how many replicas there should be now.
        resumed: the run is resumed: rollout.min_replicas are enough, the others join later.
        others_s: as in wait_for_enough.
    Raises: DeadlineExceeded: names the services missing after run.startup_timeout_s; TrainerDead: its pods have failed.
    """
    if cluster is None and not resumed:
        record = await _wait_for_all(config, registry, wanted)
    else:
        outlook: Outlook = LeaseOutlook(config, registry)
        if cluster is not None:
            from coordinator.fleet.kubernetes.arrivals import ClusterOutlook

            outlook = ClusterOutlook(config, cluster)
        record = await wait_for_enough(config, registry, outlook, wanted, others_s=others_s)
    trainer = Trainer(record.address, identity, fence)
    stack.push_async_callback(trainer.close)
    watched = WatchedFleet(registry, trainer, identity)
    stack.push_async_callback(watched.close)
    fleet = watched if cluster is None else _kept(config, watched, cluster, stack)
    services = Services(
        trainer=trainer,
        fleet=fleet,
        startup_timeout_s=config.run.startup_timeout_s,
        lease_ttl_s=config.sync.lease_ttl_s,
    )
    if cluster is None:
        return services
    from coordinator.fleet.kubernetes.returns import TrainerGuard

    return replace(services, guard=TrainerGuard(cluster, services.trainer_answers))


def merge_versions(services: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Merge the packages of all services into one table; a version that differs is kept as `service.package`.

    >>> merged = merge_versions({"trainer": {"torch": "2.13"}, "rollout-0": {"torch": "2.12", "sglang": "0.5"}})
    >>> merged["torch"], merged["rollout-0.torch"], merged["sglang"]
    ('2.13', '2.12', '0.5')
    """
    merged: dict[str, str] = {}
    for service, packages in {**services, "coordinator": software_versions(_OWN_PACKAGES)}.items():
        for package, version in packages.items():
            if merged.setdefault(package, version) != version:
                merged[f"{service}.{package}"] = version
    return dict(sorted(merged.items()))


async def _wait_for_all(config: RunConfig, registry: Registry, wanted: Callable[[], int]) -> ServiceRecord:
    """Wait for the trainer and all replicas. Returns: the trainer."""
    names, timeout_s = _Names(wanted), config.run.startup_timeout_s
    trainers, rollouts = await asyncio.gather(
        _found(registry, "trainer", ["trainer"], timeout_s), _found(registry, "rollout", names, timeout_s)
    )
    if isinstance(trainers, DeadlineExceeded) or isinstance(rollouts, DeadlineExceeded):
        # Both errors: a failed trainer may be the reason why replicas are missing.
        missing = [str(result) for result in (trainers, rollouts) if isinstance(result, DeadlineExceeded)]
        raise DeadlineExceeded("; ".join(missing))
    (trainer,) = trainers
    return trainer


class _Names(Sequence[str]):
    """Names of the replicas that there should be, whose number may change while they are waited for."""

    def __init__(self, wanted: Callable[[], int]) -> None:
        self._wanted = wanted

    def __len__(self) -> int:
        return self._wanted()

    def __getitem__(self, index: Any) -> Any:
        return [f"rollout-{number}" for number in range(self._wanted())][index]


async def _found(
    registry: Registry, role: str, names: Sequence[str], timeout_s: float
) -> list[ServiceRecord] | DeadlineExceeded:
    """Wait for services. Returns: their records, or the error that names the missing ones."""
    try:
        return await asyncio.to_thread(registry.wait_for, role, names, timeout_s)
    except DeadlineExceeded as missing:
        return missing


def _kept(config: RunConfig, watched: WatchedFleet, cluster: "Cluster", stack: AsyncExitStack) -> Fleet:
    """Make a fleet of pods, and start the task that evicts stuck ones."""
    from coordinator.fleet.kubernetes.fleet import KubernetesFleet
    from coordinator.fleet.kubernetes.keeper import Keeper

    fleet = KubernetesFleet(watched, cluster.pods, lease_ttl_s=config.sync.lease_ttl_s)
    keeper = Keeper(cluster, fleet, probe_timeout_s=config.sync.probe_timeout_s)
    task = asyncio.create_task(keeper.run(), name="fleet-keeper")
    watch(task, lambda error: cluster.noted.note("keeper", f"watch of stuck replicas ended: {error}"))
    stack.push_async_callback(cancel, task)
    return fleet
