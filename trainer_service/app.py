"""Wires a rank together: rank 0 serves gRPC and issues commands, the others execute them."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable

from servicekit.environment import ServiceEnvironment
from servicekit.errors import DeadlineExceeded
from servicekit.lifecycle.announcing import announce
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK
from servicekit.lifecycle.tasks import DEADLINE, end_of, failing, first_of
from servicekit.lifecycle.termination import run_main, run_until_stopped
from servicekit.logs import configure_logging, get_logger
from servicekit.metrics import GPUS, export_disk_of, serve_metrics
from servicekit.redis.records import AgreedSettings
from servicekit.rpc.server import GrpcServer
from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2_grpc
from tandem_config.comparing.agreeing import agreed_settings
from trainer_service.ranks.commands import Command, Commander, follow
from trainer_service.ranks.liveness import failure_name
from trainer_service.servicer import TrainerServicer
from trainer_service.worker import Worker, WorkerSettings
from weightsync.membership.coordinator_lease import fence_of
from weightsync.round import client
from weightsync.transfer.devices import check_device, gpus_of

SERVICE = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
NAME = "trainer"
# After SIGTERM the coordinator has run.stop_timeout_s to save what was trained since the last checkpoint; then running
# calls have this long to finish, then all ranks have as long to stop.
DRAIN_GRACE_S = 30.0

log = get_logger(__name__)


def run(settings: WorkerSettings) -> int:
    """Run the rank until the process is asked to stop, then end the process with its exit code."""

    async def main(stop: asyncio.Event) -> int:
        configure_logging(NAME, rank=settings.place.rank)
        check_device(settings.environment.device)
        return await (_RankZero(settings).run(stop) if settings.place.rank == 0 else _follower(settings, stop))

    code = run_main(NAME, main, name=failure_name(settings.place.rank))
    sys.stderr.flush()
    # threads that wait for a lost peer would delay the interpreter's exit until their timeout
    os._exit(code)


class _RankZero:
    """The rank that serves gRPC."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._environment: ServiceEnvironment = settings.environment

    async def run(self, stop: asyncio.Event) -> int:
        """Serve from the start, ready when the model is loaded. Returns: the exit code."""
        loop = asyncio.get_running_loop()
        identity = self._environment.identity(NAME)
        settings = AgreedSettings(agreed_settings(self._settings.config))
        registry = await self._environment.open_registry(settings)
        grpo = self._settings.config.grpo
        commander = Commander()

        def on_stop(why: str) -> None:
            log.info("stop requested by a rank", why=why)
            loop.call_soon_threadsafe(stop.set)

        worker = Worker(self._settings, registry, commander.run, on_stop)
        turns = self._settings.config.environment
        # Each turn of an episode may be a sequence of its own.
        max_samples = grpo.prompts_per_iteration * grpo.group_size * (1 if turns is None else turns.max_turns)
        servicer = TrainerServicer(
            commander,
            max_samples=max_samples,
            run_dir=self._environment.run_dir,
            settings_digest=settings.digest,
            interrupt=worker.interrupt,
        )
        server = GrpcServer(
            NAME, bind=self._environment.bind, identity=identity, health_bind=self._environment.health_bind
        )
        server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, SERVICE)
        server.add(weights_pb2_grpc.add_RoundServiceServicer_to_server, servicer, client.SERVICE)
        address = await server.start()
        export_disk_of(self._environment.run_dir)
        GPUS.set(gpus_of(self._settings.place.world_size))
        metrics_port = serve_metrics(self._environment.bind_host, self._environment.metrics_port)
        worker.start()
        try:
            if not await _loaded(worker, stop):
                return EXIT_OK
            # Read last: a coordinator that leads later calls TakeOver first.
            ttl_s = self._settings.config.sync.lease_ttl_s
            fence = await asyncio.to_thread(fence_of, self._environment.redis_url, self._environment.run_id, ttl_s)
            servicer.serve_engine(worker.loaded.result(), fence)
            lost: asyncio.Future[None] = loop.create_future()
            record = self._environment.record("trainer", NAME, address, metrics_port)
            server.set_ready(await announce(registry, record, ttl_s, stop, failing(lost)))
            ended = asyncio.wrap_future(worker.ended)
            await run_until_stopped(stop, {"ranks": ended, "name": lost})
            await self._until_saved(servicer, ended)
            return await self._shut_down(server, commander, ended)
        finally:
            server.set_ready(False)
            await asyncio.to_thread(registry.close)
            with contextlib.suppress(Exception):
                await server.drain(0.0)

    async def _until_saved(self, servicer: TrainerServicer, ended: "asyncio.Future[None]") -> None:
        """Serve on until the coordinator has saved what was trained since the last checkpoint."""
        timeout_s = self._settings.config.run.stop_timeout_s
        first = await first_of({"saved": servicer.until_saved(), "ranks": end_of(ended)}, timeout_s=timeout_s)
        if first.name == DEADLINE:
            log.warning("shutdown: checkpoint not saved within run.stop_timeout_s", seconds=timeout_s)

    async def _shut_down(self, server: GrpcServer, commander: Commander, ended: "asyncio.Future[None]") -> int:
        """Refuse new calls, finish running ones, stop all ranks. Returns: the exit code."""
        await server.drain(DRAIN_GRACE_S)
        stopping = commander.submit(Command.STOP)
        try:
            await asyncio.wait_for(asyncio.wrap_future(stopping), DRAIN_GRACE_S)
            await asyncio.wait_for(asyncio.shield(ended), DRAIN_GRACE_S)
        except TimeoutError:
            log.error("ranks did not stop in time", seconds=DRAIN_GRACE_S, activity=commander.current.name.lower())
            return EXIT_FAILED
        log.info("trainer stopped", ranks=self._settings.place.world_size)
        return EXIT_OK


async def _follower(settings: WorkerSettings, stop: asyncio.Event) -> int:
    """Run a rank other than 0, until rank 0 stops it. Returns: the exit code."""
    registry = await settings.environment.open_registry()
    worker = Worker(settings, registry, follow, lambda _: None)
    async with _host_health(settings) as set_ready:
        worker.start()
        if not await _loaded(worker, stop):
            return EXIT_OK
        set_ready(True)
        patience_s = settings.config.run.stop_timeout_s + 3 * DRAIN_GRACE_S
        await _until_stopped(worker, settings.place.rank, stop, patience_s)
    log.info("trainer rank stopped", rank=settings.place.rank)
    return EXIT_OK


async def _until_stopped(worker: Worker, rank: int, stop: asyncio.Event, patience_s: float) -> None:
    """Wait for the end of the commands; on a stop signal ask rank 0 to stop all ranks.

    Raises: DeadlineExceeded: rank 0 did not do so in time.
    """
    ended = asyncio.wrap_future(worker.ended)
    first = await first_of({"ranks": ended, "stop": stop})
    if first.name == "stop":
        if worker.liveness is not None:
            with contextlib.suppress(RuntimeError):  # rank 0 has ended already
                worker.liveness.ask_to_stop(f"rank {rank} was asked to stop")
        first = await first_of({"ranks": ended}, timeout_s=patience_s)
    if first.name == DEADLINE:
        raise DeadlineExceeded(f"rank 0 did not stop rank {rank} within {patience_s:g} s")


@contextlib.asynccontextmanager
async def _host_health(settings: WorkerSettings) -> AsyncIterator[Callable[[bool], None]]:
    """Serve health for the probes of a host without rank 0: its first rank does so, and serves nothing else.

    Yields: the function that sets readiness.
    """
    bind = settings.environment.health_bind
    if bind is None or settings.place.local_rank != 0:
        yield lambda ready: None
        return
    server = GrpcServer(NAME, bind=bind)
    await server.start()
    try:
        yield server.set_ready
    finally:
        await server.drain(0.0)


async def _loaded(worker: Worker, stop: asyncio.Event) -> bool:
    """Wait for the model.

    Returns: False if the process was asked to stop first. Raises: the error of loading the model.
    """
    return (await first_of({"loaded": asyncio.wrap_future(worker.loaded), "stop": stop})).name == "loaded"
