"""Builds one rollout replica and runs it from start to drain: the only place that wires."""

import asyncio
import uuid
from collections.abc import Callable

from rollout_service.admission import Admission
from rollout_service.engine import RolloutEngine
from rollout_service.metrics import RolloutMetrics
from rollout_service.pauses import Pauses
from rollout_service.ranks import RankClients
from rollout_service.servicer import RolloutServicer
from rollout_service.updates import WeightUpdates
from servicekit.environment import ServiceEnvironment
from servicekit.errors import AlreadyExists
from servicekit.lifecycle import run_until_stopped
from servicekit.logs import get_logger
from servicekit.metrics import serve_metrics
from servicekit.registry import Registry, ServiceRecord
from servicekit.server import GrpcServer
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from tandem_config.schema import RunConfig
from weightsync.layout import Parallel
from weightsync.nccl_settings import settle_nccl_settings

_log = get_logger(__name__)

# How long a stopping replica lets running groups finish; a pod's grace period must be longer.
DRAIN_S = 20.0
ANNOUNCE_RETRY_S = 0.25
_FULL_NAME = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name


MakeEngine = Callable[[RunConfig, str, ServiceEnvironment, asyncio.Event], RolloutEngine]


def make_sglang_engine(
    config: RunConfig, name: str, environment: ServiceEnvironment, stop: asyncio.Event
) -> RolloutEngine:
    """The engine of a replica, not started. It sets `stop` when its process is told to end."""
    from rollout_service.sglang_engine.engine import SglangEngine
    from weightsync.devices import check_device

    check_device(environment.device)
    settle_nccl_settings()
    return SglangEngine(
        config,
        name,
        redis_url=environment.redis_url,
        group=f"tandem:{environment.run_id}",
        host=environment.advertise_host,
        on_terminate=stop.set,
    )


async def serve(
    config: RunConfig,
    name: str,
    environment: ServiceEnvironment,
    stop: asyncio.Event,
    make_engine: MakeEngine = make_sglang_engine,
) -> None:
    """Run replica `name` until `stop`.

    Raises: ConfigError: Redis, a certificate or an address is not usable; RuntimeError: the engine did not start, or
        died.
    """
    server = GrpcServer(
        "rollout",
        bind=environment.bind,
        identity=environment.identity("rollout"),
        health_bind=environment.health_bind,
    )
    registry = await asyncio.to_thread(
        Registry, environment.redis_url, environment.run_id, wait_s=environment.redis_wait_s
    )
    engine = make_engine(config, name, environment, stop)
    try:
        if await _start_unless_stopped(engine, stop):
            await _serve_engine(config, name, environment, stop, engine, registry, server)
    finally:
        await engine.shutdown()
        await asyncio.to_thread(registry.close)


async def _start_unless_stopped(engine: RolloutEngine, stop: asyncio.Event) -> bool:
    """Whether the engine is up; False if `stop` came first. SGLang imports for 10 s and more."""
    starting = asyncio.create_task(engine.start(), name="engine-start")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        return False
    await starting
    return True


async def _serve_engine(
    config: RunConfig,
    name: str,
    environment: ServiceEnvironment,
    stop: asyncio.Event,
    engine: RolloutEngine,
    registry: Registry,
    server: GrpcServer,
) -> None:
    metrics = RolloutMetrics()
    ranks = RankClients(engine.rank_addresses)
    admission = Admission()
    metrics.running_groups.set_function(lambda: admission.running_groups)
    metrics.watch_load(engine.load)

    def on_state(state: weights_pb2.ReplicaState.ValueType, policy_version: int) -> None:
        metrics.observe_state(state, policy_version)
        server.set_ready(state == weights_pb2.REPLICA_STATE_SERVING)

    updates = WeightUpdates(
        engine, ranks, Pauses(engine, admission), on_state, metrics.observe_reports, metrics.observe_outcome
    )
    servicer = RolloutServicer(
        name=name,
        parallel=Parallel(tensor=config.rollout.tensor_parallel, expert=config.rollout.expert_parallel),
        max_groups=config.rollout.max_groups_per_call,
        engine=engine,
        ranks=ranks,
        admission=admission,
        updates=updates,
        metrics=metrics,
    )
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, _FULL_NAME)
    address = environment.advertised(await server.start())
    on_state(updates.state, updates.policy_version)
    metrics_port = serve_metrics(environment.bind_host, environment.metrics_port)
    lost = await _announce(registry, name, address, environment.advertised(metrics_port), config.sync.lease_ttl_s)
    _log.info("replica up", name=name, address=address, metrics_port=metrics_port)
    try:
        await run_until_stopped(stop, [_watch(engine.failed, "engine"), _watch(lost, "registry")])
    finally:
        servicer.refuse_new_calls()
        await server.drain(DRAIN_S if stop.is_set() else 0.0)
        await ranks.close()


async def _announce(
    registry: Registry, name: str, address: str, metrics_address: str, ttl_s: float
) -> "asyncio.Future[None]":
    """Announces the replica, once the lease of a predecessor that was killed has run out.

    Returns: a future that fails when another process has taken the name.
    Raises: AlreadyExists: another process has it and lives.
    """
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()

    def on_lost(sentence: str) -> None:
        loop.call_soon_threadsafe(lost.set_exception, RuntimeError(sentence))

    record = ServiceRecord(
        role="rollout", name=name, address=address, metrics_address=metrics_address, worker_id=uuid.uuid4().hex
    )
    deadline_s = loop.time() + 2 * ttl_s
    while True:
        try:
            await asyncio.to_thread(registry.announce, record, ttl_s, on_lost)
            return lost
        except AlreadyExists:
            if loop.time() >= deadline_s:
                raise
        await asyncio.sleep(ANNOUNCE_RETRY_S)


def _watch(future: "asyncio.Future[None]", name: str) -> "asyncio.Task[None]":
    async def wait() -> None:
        await asyncio.shield(future)

    return asyncio.create_task(wait(), name=name)
