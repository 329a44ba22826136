"""Build one rollout replica and run it from start to drain: the only place that wires.

Of an engine over several hosts this runs the leader; worker_app.py wires the others.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollout_service.engine import RolloutEngine
from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.hosts.leader import HostWorkers
from rollout_service.metrics import RolloutMetrics
from rollout_service.servicer import RolloutServicer
from rollout_service.stall import StallWatch
from rollout_service.weight_updates.admission import Admission
from rollout_service.weight_updates.pauses import Pauses
from rollout_service.weight_updates.ranks import RankGroups, rank_clients
from rollout_service.weight_updates.updates import WeightUpdates
from servicekit.environment import ServiceEnvironment
from servicekit.errors import TandemError
from servicekit.lifecycle.announcing import announce
from servicekit.lifecycle.tasks import failing, first_of
from servicekit.lifecycle.termination import run_until_stopped
from servicekit.logs import get_logger
from servicekit.metrics import GPUS, serve_metrics
from servicekit.redis.records import AgreedSettings
from servicekit.redis.registry import Registry
from servicekit.rpc.fence import FenceGuard
from servicekit.rpc.server import GrpcServer
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem_config.comparing.agreeing import agreed_settings
from tandem_config.schema import RunConfig
from weightsync.layouts.layout import Parallel
from weightsync.layouts.registry import ROLLOUT_ENGINE
from weightsync.membership.coordinator_lease import fence_of
from weightsync.round.client import SERVICE

log = get_logger(__name__)

# How long a replica that leaves lets running groups finish, and then return as they are; a pod's grace period must be
# longer.
DRAIN_S, HAND_OVER_S = 20.0, 3.0
# Timeout of a read from the TCP store of an engine over several hosts.
STORE_READ_S = 300.0
_FULL_NAME = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name


MakeEngine = Callable[[RunConfig, str, ServiceEnvironment, asyncio.Event, HostRanks], RolloutEngine]


def make_sglang_engine(
    config: RunConfig, name: str, environment: ServiceEnvironment, stop: asyncio.Event, share: HostRanks
) -> RolloutEngine:
    """Make a replica's engine, without starting it. It sets `stop` when its process receives SIGTERM."""
    from rollout_service.sglang_engine.engine import SglangEngine
    from weightsync.membership.nccl_settings import settle_containers
    from weightsync.transfer.devices import check_device, gpus_of

    check_device(environment.device)
    GPUS.set(gpus_of(Parallel(tensor=config.rollout.tensor_parallel, expert=config.rollout.expert_parallel).world_size))
    settle_containers()
    return SglangEngine(
        config,
        name,
        redis_url=environment.redis_url,
        group=f"tandem:{environment.run_id}",
        host=environment.advertise_host,
        run_dir=environment.run_dir,
        on_terminate=stop.set,
        share=share,
    )


async def serve(
    config: RunConfig,
    name: str,
    environment: ServiceEnvironment,
    stop: asyncio.Event,
    make_engine: MakeEngine = make_sglang_engine,
) -> None:
    """Run replica `name` until `stop`; of an engine over several hosts, its leader.

    Raises: ConfigError: Redis, a certificate or an address is not usable; RuntimeError: the engine did not start, or
        died; Unavailable, DeadlineExceeded: another host of the engine is lost, or did not join.
    """
    share = HostRanks.of(config, {})
    identity = environment.identity("rollout")
    server = GrpcServer("rollout", bind=environment.bind, identity=identity, health_bind=environment.health_bind)
    registry = await environment.open_registry(AgreedSettings(agreed_settings(config)))
    workers = HostWorkers(name, share, identity=identity, ttl_s=config.sync.lease_ttl_s, on_stop=stop.set)
    replica = _Replica(config, name, environment, stop, registry, server, workers)
    try:
        await replica.run(share, make_engine)
        await workers.leave("it was asked to stop", failed=False)
    except Exception as error:
        why = await workers.explain(error)
        await workers.leave(str(why), failed=True)
        raise why from error
    finally:
        await replica.shutdown()
        await workers.close()
        await asyncio.to_thread(registry.close)


class _Replica:
    """One replica, from the joining of its hosts to its drain."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        environment: ServiceEnvironment,
        stop: asyncio.Event,
        registry: Registry,
        server: GrpcServer,
        workers: HostWorkers,
    ) -> None:
        self._config = config
        self._name = name
        self._environment = environment
        self._stop = stop
        self._registry = registry
        self._server = server
        self._workers = workers
        self._engine: RolloutEngine | None = None
        self._store: object = None  # the TCP store of SGLang's ranks on several hosts; open while referenced

    async def run(self, share: HostRanks, make_engine: MakeEngine) -> None:
        """Run until `stop` is set and the calls under way are done."""
        if share.nodes > 1:
            share = await self._open_store(share)
        join = self._workers.join(share.store, self._registry, self._config.run.startup_timeout_s)
        if not await self._done(join):
            return
        engine = self._engine = make_engine(self._config, self._name, self._environment, self._stop, share)
        # SGLang imports for 10 s and more.
        if await self._done(engine.start()):
            await self._serve(engine)

    async def _done(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work, unless `stop` or a lost worker comes first.

        Returns: whether the work was done. Raises: its error; why a worker can no longer serve.
        """
        return (await first_of({"workers": self._workers.lost, "work": work, "stop": self._stop})).name == "work"

    async def shutdown(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            await self._engine.shutdown()

    async def _open_store(self, share: HostRanks) -> HostRanks:
        from weightsync.transfer.communicators.tcp_store import bound_store  # imports torch

        # STORE_READ_S is for our connection; SGLang sets its own timeout on its connections.
        self._store, port = await asyncio.to_thread(bound_store, self._environment.bind_host, STORE_READ_S)
        return share.meeting_at(self._environment.advertised(port))

    async def _serve(self, engine: RolloutEngine) -> None:
        local = rank_clients(engine.rank_addresses)
        # Read last: a coordinator that takes over after this announces itself with TakeOver.
        ttl_s = self._config.sync.lease_ttl_s
        fence = await asyncio.to_thread(fence_of, self._environment.redis_url, self._environment.run_id, ttl_s)
        admission = Admission()
        pauses = Pauses(engine, admission)
        servicer, on_up = self._wire(engine, RankGroups([*local, *self._workers.ranks()]), fence, admission, pauses)
        watch = StallWatch(
            self._name,
            engine,
            [rank.answers for rank in local],
            self._config.rollout.stall_timeout_s,
            admission=admission,
            load=servicer.load,
            finished=lambda: servicer.generated_tokens,
            paused=lambda: pauses.paused,
        )
        self._server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, _FULL_NAME)
        self._server.add(weights_pb2_grpc.add_RoundServiceServicer_to_server, servicer, SERVICE)
        address = self._environment.advertised(await self._server.start())
        on_up()
        metrics_port = serve_metrics(self._environment.bind_host, self._environment.metrics_port)
        record = self._environment.record("rollout", self._name, address, metrics_port)
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ends = {"engine": engine.failed, "registry": lost, "workers": self._workers.lost}
        try:
            if await announce(self._registry, record, ttl_s, self._stop, failing(lost)):
                log.info("replica up", name=self._name, address=address, metrics_port=metrics_port)
            await run_until_stopped(self._stop, {**ends, "stall": watch.run()})
        finally:
            if self._stop.is_set():
                await self._leave(engine, servicer)
            await self._server.drain(HAND_OVER_S if self._stop.is_set() else 0.0)
            for rank in local:
                await rank.close()

    async def _leave(self, engine: RolloutEngine, servicer: RolloutServicer) -> None:
        """Out of dispatch, then hand over: no work comes any more, and what runs ends, or returns with its tokens."""
        servicer.leave()
        self._server.set_ready(False)
        is_idle, _ = await asyncio.gather(servicer.until_idle(DRAIN_S), asyncio.to_thread(self._withdraw))
        if not is_idle:
            log.warning("grace period over: what runs is handed over as it is", seconds=DRAIN_S)
            await engine.abort_running()
            await servicer.until_idle(HAND_OVER_S)

    def _withdraw(self) -> None:
        try:
            self._registry.withdraw()
        except TandemError as error:
            log.warning("record not withdrawn, its lease will expire", error=str(error))

    def _wire(
        self, engine: RolloutEngine, ranks: RankGroups, fence: FenceGuard, admission: Admission, pauses: Pauses
    ) -> tuple[RolloutServicer, Callable[[], None]]:
        """Wire the servicer. Returns: it, and a function to call once it is served."""
        metrics, rollout = RolloutMetrics(), self._config.rollout
        metrics.running_groups.set_function(lambda: admission.running_groups)
        metrics.watch_load(engine.load)

        def on_state(state: weights_pb2.ReplicaState.ValueType, policy_version: int) -> None:
            metrics.observe_state(state, policy_version)
            self._server.set_ready(state == weights_pb2.REPLICA_STATE_SERVING and not self._stop.is_set())

        updates = WeightUpdates(
            engine,
            ranks,
            pauses,
            on_state,
            metrics.sync.observe_reports,
            metrics.sync.observe_outcome,
            metrics.sync.observe_pause,
            name=self._name,
            seeded=rollout.serve_model,
        )
        servicer = RolloutServicer(
            name=self._name,
            parallel=Parallel(engine=ROLLOUT_ENGINE, tensor=rollout.tensor_parallel, expert=rollout.expert_parallel),
            max_groups=rollout.max_groups_per_call,
            engine=engine,
            ranks=ranks,
            admission=admission,
            updates=updates,
            metrics=metrics,
            fence=fence,
            settings_digest=self._registry.settings_digest,
        )
        return servicer, lambda: on_state(updates.state, updates.policy_version)
