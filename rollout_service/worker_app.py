"""Build and run a further host of a replica's engine: its share of SGLang's ranks, which serve its leader only."""

import asyncio
import uuid
from collections.abc import Callable, Mapping

from rollout_service.app import DRAIN_S
from rollout_service.engine import EngineProcesses
from rollout_service.hosts.connection import WORKER_ROLE, beat_s
from rollout_service.hosts.host_ranks import HostRanks, worker_name
from rollout_service.hosts.membership import WorkerMembership
from rollout_service.hosts.servicer import WorkerServicer
from rollout_service.stall import StallWatch
from rollout_service.weight_updates.ranks import RankClient, RankGroups, rank_clients
from servicekit.environment import ServiceEnvironment
from servicekit.errors import DeadlineExceeded, Unavailable
from servicekit.lifecycle.announcing import announce
from servicekit.lifecycle.tasks import DEADLINE, Wait, cancel, end_of, failing, first_of
from servicekit.logs import get_logger
from servicekit.metrics import serve_metrics
from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.rpc.server import GrpcServer
from tandem_api.rollout.v1 import worker_pb2, worker_pb2_grpc
from tandem_api.weights.v1 import weights_pb2_grpc
from tandem_config.comparing.agreeing import agreed_settings
from tandem_config.schema import RunConfig
from weightsync.round.client import SERVICE

log = get_logger(__name__)

# After a stop: how long to wait for the leader, which drains first, to release this host.
LET_GO_S = DRAIN_S + 10.0
# After our ranks have failed: how long to wait to learn whether the leader's end caused it.
LAST_BEAT_S = 4.0
_FULL_NAME = worker_pb2.DESCRIPTOR.services_by_name["RolloutWorkerService"].full_name

MakeProcesses = Callable[[RunConfig, str, ServiceEnvironment, HostRanks], EngineProcesses]


def make_sglang_processes(
    config: RunConfig, name: str, environment: ServiceEnvironment, share: HostRanks
) -> EngineProcesses:
    """Make this host's processes of a replica's engine, without starting them."""
    from rollout_service.sglang_engine.host import SglangProcesses
    from weightsync.membership.nccl_settings import settle_containers
    from weightsync.transfer.devices import check_device

    check_device(environment.device)
    settle_containers()
    return SglangProcesses(
        config,
        name,
        share,
        redis_url=environment.redis_url,
        group=f"tandem:{environment.run_id}",
        host=environment.advertise_host,
        run_dir=environment.run_dir,
    )


async def serve_worker(
    config: RunConfig,
    name: str,
    environment: ServiceEnvironment,
    stop: asyncio.Event,
    share: HostRanks,
    make_processes: MakeProcesses = make_sglang_processes,
) -> None:
    """Run host `share.host` of replica `name` until its leader releases it.

    Raises: ConfigError: Redis, a certificate or an address is not usable; RuntimeError: the ranks did not start;
        DeadlineExceeded: no leader joined this host; Unavailable: the leader is lost or failed, or a rank has died.
    """
    server = GrpcServer(
        WORKER_ROLE,
        bind=environment.bind,
        identity=environment.identity("rollout"),
        callers=("rollout",),
        health_bind=environment.health_bind,
    )
    registry = await environment.open_registry(AgreedSettings(agreed_settings(config)))
    worker = _Worker(config, name, environment, stop, server)
    try:
        await worker.run(registry, share, make_processes)
    finally:
        await worker.shutdown()
        await asyncio.to_thread(registry.close)


class _Worker:
    """One worker, from its announcement to the leader's Leave."""

    def __init__(
        self, config: RunConfig, name: str, environment: ServiceEnvironment, stop: asyncio.Event, server: GrpcServer
    ) -> None:
        self._config = config
        self._name = name
        self._environment = environment
        self._stop = stop
        self._server = server
        self._processes: EngineProcesses | None = None
        self._ranks: list[RankClient] = []

    async def run(self, registry: Registry, share: HostRanks, make_processes: MakeProcesses) -> None:
        """Run until the leader releases this process, or until it is asked to stop before it has a leader."""
        record, membership, servicer = await self._serve(share)
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not await announce(registry, record, self._config.sync.lease_ttl_s, self._stop, failing(lost)):
            return
        log.info("worker up", name=record.name, address=record.address)
        ends: dict[str, Wait] = {"name": lost, "leader": membership.over}
        if (await first_of({**ends, "joined": self._leader(membership), "stop": self._stop})).name != "joined":
            return
        processes = make_processes(self._config, self._name, self._environment, membership.joined.result())
        self._processes = processes
        if (await first_of({**ends, "started": processes.start(), "stop": self._stop})).name != "started":
            return
        self._ranks = rank_clients(processes.rank_addresses, share.ranks.start)
        servicer.serve_ranks(RankGroups(self._ranks))
        membership.ready = True
        self._server.set_ready(True)
        log.info("ranks up", ranks=list(share.ranks))
        pings = [rank.answers for rank in self._ranks]
        watch = StallWatch(record.name, processes, pings, self._config.rollout.stall_timeout_s)
        watching = asyncio.create_task(watch.run(), name="stall")  # what it finds fails the processes
        try:
            await self._until_over(membership, processes, ends)
        finally:
            await cancel(watching)

    async def shutdown(self) -> None:
        """End the ranks, and the server last: the leader may still call it."""
        if self._processes is not None:
            await self._processes.shutdown()
        await self._server.drain(0.0)
        for rank in self._ranks:
            await rank.close()

    async def _serve(self, share: HostRanks) -> tuple[ServiceRecord, WorkerMembership, WorkerServicer]:
        worker_id = uuid.uuid4().hex
        membership = WorkerMembership(self._name, share, self._config.sync.lease_ttl_s)
        servicer = WorkerServicer(membership, worker_id)
        self._server.add(worker_pb2_grpc.add_RolloutWorkerServiceServicer_to_server, servicer, _FULL_NAME)
        self._server.add(weights_pb2_grpc.add_RoundServiceServicer_to_server, servicer, SERVICE)
        address = await self._server.start()
        metrics_port = serve_metrics(self._environment.bind_host, self._environment.metrics_port)
        name = worker_name(self._name, share.host)
        record = self._environment.record(WORKER_ROLE, name, address, metrics_port, worker_id)
        return record, membership, servicer

    async def _leader(self, membership: WorkerMembership) -> None:
        timeout_s = self._config.run.startup_timeout_s
        try:
            await asyncio.wait_for(asyncio.shield(membership.joined), timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no leader of {self._name} joined this host within {timeout_s:g} s; "
                "is its rollout_service (TANDEM_HOST_INDEX=0) running?"
            ) from None

    async def _until_over(
        self, membership: WorkerMembership, processes: EngineProcesses, ends: Mapping[str, Wait]
    ) -> None:
        first = await first_of({**ends, "ranks": end_of(processes.failed), "stop": self._stop})
        if first.name == "stop":
            membership.asked_to_stop = True  # the answer to the leader's next beat carries it
            first = await first_of({**ends, "ranks": end_of(processes.failed)}, timeout_s=LET_GO_S)
        if first.name == DEADLINE:
            raise DeadlineExceeded(f"the leader of {self._name} did not release this host within {LET_GO_S:g} s")
        if first.name == "ranks":
            await self._report_failure(membership, processes)

    async def _report_failure(self, membership: WorkerMembership, processes: EngineProcesses) -> None:
        """Report to the leader that our ranks have failed. Raises: Unavailable: why, as far as both sides know."""
        error = processes.failed.exception()
        membership.failure = str(error)
        await asyncio.wait({membership.over}, timeout=LAST_BEAT_S)
        if membership.over.done():
            ending = membership.over.exception()
            if ending is None:
                return
            raise Unavailable(f"{error}; {ending}")
        if membership.silent_s > 2 * beat_s(self._config.sync.lease_ttl_s):
            silent = f"silent for {membership.silent_s:.1f} s"
            raise Unavailable(f"the leader of {self._name} is lost ({silent}); seen here as: {error}")
        raise Unavailable(str(error))
