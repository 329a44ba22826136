"""Wiring: the only place that builds things and connects them, and the coordinator process from start to exit code."""

import asyncio
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coordinator.announcing import announce
from coordinator.build import build_run
from coordinator.checkpoint import marks
from coordinator.control import RunControl, State
from coordinator.events import EventKind, EventLog
from coordinator.fleet.view import FleetView
from coordinator.inputs import Inputs, read_inputs
from coordinator.lead import last_look, may_write, telling
from coordinator.leaving import Leaving, exit_code_of, words_of
from coordinator.observed import Observed
from coordinator.report import METRICS_FILE, MetricsFile, numeric
from coordinator.reserve import release_reserve, take_reserve
from coordinator.rewards.base import Reward
from coordinator.rewards.registry import build_reward
from coordinator.servicer import FULL_NAME, CoordinatorServicer
from coordinator.services import Services, find_services
from coordinator.state import STATE_FILE
from coordinator.summary import SUMMARY_FILE, build_summary
from coordinator.web.history import History
from coordinator.web.server import PageServer
from coordinator.web.snapshot import Source
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, Fenced, TandemError, Unavailable
from servicekit.files import write_json_atomic
from servicekit.lifecycle import EXIT_FAILED, EXIT_OK, cancel
from servicekit.logs import get_logger
from servicekit.metrics import export_disk_of, serve_metrics
from servicekit.registry import PAGE_URL, Registry, ServiceRecord
from servicekit.server import GrpcServer
from servicekit.tls import Identity
from tandem_api.coordinator.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from tandem_config.schema import RunConfig
from weightsync.coordinator_lease import CoordinatorLease
from weightsync.rendezvous import Evicted, Rendezvous

if TYPE_CHECKING:
    from coordinator.fleet.kubernetes.cluster import Cluster
    from coordinator.fleet.kubernetes.returns import TrainerGuard

# Long enough for watchers to read the last events, short enough not to be waited for.
_DRAIN_S = 2.0
# A trainer that is lost this often without an iteration in between will not be better next time.
MAX_RETURNS = 3

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class App:
    """The coordinator process's parts that live as long as it does.

    lost: done, with a sentence, when another coordinator has taken our place.
    """

    config: RunConfig
    environment: ServiceEnvironment
    identity: Identity | None
    inputs: Inputs
    reward: Reward
    registry: Registry
    lead: CoordinatorLease
    lost: "asyncio.Future[str]"
    events: EventLog
    control: RunControl
    leaving: Leaving
    cluster: "Cluster | None"
    view: FleetView
    observed: Observed


async def conduct(config: RunConfig, environment: ServiceEnvironment, *, resume: bool, stop: asyncio.Event) -> int:
    """Run the coordinator until the run is over or `stop` is set.

    Returns: the exit code: 0 finished or stopped, 1 failed.
    Raises: ConfigError: something on disk or in the environment cannot be used; nothing was started.
    """
    identity = environment.identity("coordinator")
    inputs = await asyncio.to_thread(read_inputs, config, environment.run_dir, resume=resume)
    try:
        reward = build_reward(config.reward)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    registry = await asyncio.to_thread(
        Registry, environment.redis_url, environment.run_id, wait_s=environment.redis_wait_s
    )
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    group = await asyncio.to_thread(Rendezvous, environment.redis_url, f"tandem:{environment.run_id}")
    events = EventLog()
    cluster = await asyncio.to_thread(_reach_cluster, config, environment, events)
    app = App(
        config=config,
        environment=environment,
        identity=identity,
        inputs=inputs,
        reward=reward,
        registry=registry,
        lead=CoordinatorLease(group, config.sync.lease_ttl_s, telling(lost)),
        lost=lost,
        events=events,
        control=RunControl(events),
        leaving=Leaving(),
        cluster=cluster,
        view=FleetView(cluster),
        observed=Observed(),
    )
    async with AsyncExitStack() as stack:
        overview = await _overview(app, stack)
        await _serve_page(app, overview, stack)
        server = await _serve(app, overview, stop)
        try:
            return await _run_or_stop(app, stop)
        finally:
            await reward.close()
            events.close()
            await server.drain(_DRAIN_S)
            await asyncio.to_thread(app.lead.close)
            await asyncio.to_thread(registry.close)


def _reach_cluster(config: RunConfig, environment: ServiceEnvironment, events: EventLog) -> "Cluster | None":
    """None: the fleet is not made of pods. Imports the Kubernetes client, which takes a second, only if it is."""
    if config.fleet.kind != "kubernetes":
        return None
    from coordinator.fleet.kubernetes.cluster import reach_cluster

    return reach_cluster(config, environment, events)


async def _serve(app: App, overview: Source, stop: asyncio.Event) -> GrpcServer:
    """Serve status and events from the start, so that a watcher sees what the run waits for."""
    environment = app.environment
    export_disk_of(environment.run_dir)
    metrics_port = serve_metrics(environment.bind_host, environment.metrics_port)
    server = GrpcServer(
        "coordinator", bind=environment.bind, identity=app.identity, health_bind=environment.health_bind
    )
    servicer = CoordinatorServicer(
        run=app.config.run.name,
        total_iterations=app.config.run.iterations,
        control=app.control,
        events=app.events,
        progress=app.inputs.state,
        fleet=app.view,
        overview=overview.snapshot,
    )
    server.add(add_CoordinatorServiceServicer_to_server, servicer, FULL_NAME)
    address = await server.start()
    record = ServiceRecord(
        role="coordinator",
        name="coordinator",
        address=environment.advertised(address),
        metrics_address=environment.advertised(metrics_port),
        worker_id=uuid.uuid4().hex,
    )
    await announce(app.registry, record, app.config.sync.lease_ttl_s, stop, telling(app.lost))
    server.set_ready(True)
    return server


async def _overview(app: App, stack: AsyncExitStack) -> Source:
    """The run at a glance, from now on: for the web page and for `tandem top`."""
    environment, state = app.environment, app.inputs.state
    rows = await asyncio.to_thread(MetricsFile(environment.run_dir / METRICS_FILE).rows)
    history = History([numeric(row) for row in rows if (row["iteration"] or 0) <= state.iteration])
    stack.push_async_callback(cancel, asyncio.create_task(history.follow(app.events), name="history"))
    return Source(
        run=app.config.run.name,
        total_iterations=app.config.run.iterations,
        logprob_diff_limit=app.config.grpo.logprob_diff_limit,
        run_dir=environment.run_dir,
        control=app.control,
        state=state,
        history=history,
        observed=app.observed,
        troubles=app.view.troubles,
    )


async def _serve_page(app: App, overview: Source, stack: AsyncExitStack) -> None:
    """The run's web page, if a port is set. Its address goes to the registry, where the launcher looks for it."""
    environment = app.environment
    if environment.web_port is None:
        return
    page = PageServer(environment.bind_host, environment.web_port, overview.snapshot)
    stack.push_async_callback(asyncio.to_thread, page.close)
    url = f"http://{environment.advertised(page.port)}/"
    await asyncio.to_thread(app.registry.set_value, PAGE_URL, url)
    log.info("the run's page is served", url=url)


async def _run_or_stop(app: App, stop: asyncio.Event) -> int:
    """The run, unless a signal (see leaving.py) or another coordinator comes first: then it is cancelled at once."""
    work = asyncio.create_task(_work(app), name="run")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    waits: set[asyncio.Future[Any]] = {work, stopped, app.lost}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await cancel(stopped)
    if not work.done() and app.lost.done():
        await cancel(work)
        log.error("run failed", error=app.lost.result())
        await _end(app, State.FAILED, f"{app.lost.result()}; the run is that one's")
        return EXIT_FAILED
    if not work.done() and await app.leaving.leave(work, app.config.run.stop_timeout_s):
        await _end(app, State.INTERRUPTED, "by a signal")
        return EXIT_OK
    error = work.exception()
    if error is None:
        await _end(app, State.FINISHED)
        return EXIT_OK
    # The boundary of the run: whatever failed ends it, by name.
    await _make_room(app)
    why = words_of(error)
    log.error("run failed", error=why, exc_info=None if isinstance(error, Evicted | Fenced) else error)
    await _end(app, State.FAILED, why)
    return exit_code_of(error)


async def _work(app: App) -> None:
    """The run; where the cluster gives it another trainer, again from its newest checkpoint.

    Raises: AlreadyExists: another coordinator is alive.
    """
    await asyncio.to_thread(app.lead.claim, 2 * app.config.sync.lease_ttl_s)
    await asyncio.to_thread(take_reserve, app.environment.run_dir)
    there = await asyncio.to_thread(marks, app.environment.run_dir)
    if app.inputs.resumed and there != app.inputs.marks:  # a predecessor went on while we waited for its end
        app = await _as_on_disk(app)
    async with AsyncExitStack() as stack:
        if app.cluster is not None:
            stack.callback(app.cluster.close)
            await app.cluster.start()
        returns = 0
        while True:
            before = app.inputs.state.iteration
            if await _attempt(app):
                return
            returns = returns + 1 if app.inputs.state.iteration == before else 0
            if returns >= MAX_RETURNS:
                raise Unavailable(f"the trainer was lost {returns} times in a row without a finished iteration")
            app = await _from_checkpoint(app)


async def _attempt(app: App) -> bool:
    """Find the services, run the run, write its summary. Returns: whether it is over, or its trainer another one."""
    async with AsyncExitStack() as stack:
        services = await find_services(
            app.config, app.registry, app.identity, stack, app.cluster, app.lead.fence, resumed=app.inputs.resumed
        )
        app.view.fleet = services.fleet
        await services.wait_for_trainer(app.config.run.startup_timeout_s)
        versions = await services.versions()
        run = build_run(app, services, app.lead.rendezvous, app.lead)
        guard = _guard(app, services)
        try:
            await run.execute()
        except TandemError as error:
            if guard is None:
                await services.blame(error)
                raise
            await guard.wait_for_return(error)
            return False
        if app.leaving.left:
            return True
        summary = build_summary(run.state, run.rows(), versions)
        write_json_atomic(app.environment.run_dir / SUMMARY_FILE, summary)
        return True


def _guard(app: App, services: Services) -> "TrainerGuard | None":
    """None: nobody would bring a lost trainer back."""
    if app.cluster is None:
        return None
    from coordinator.fleet.kubernetes.returns import TrainerGuard

    return TrainerGuard(app.cluster, services.trainer_answers)


async def _from_checkpoint(app: App) -> App:
    """The app with data and state as of the newest checkpoint, as after a restart with --resume."""
    done = app.inputs.state.iteration
    app = await _as_on_disk(app)
    state = app.inputs.state
    message = f"the trainer is back: going on after iteration {state.iteration}, {done} were done"
    log.warning(message, iteration=state.iteration, done=done)
    app.events.append(EventKind.WARNING, message)
    return app


async def _as_on_disk(app: App) -> App:
    """The app with data and state as of the newest checkpoint; whoever looks at its state sees that."""
    state = app.inputs.state
    inputs = await asyncio.to_thread(read_inputs, app.config, app.environment.run_dir, resume=True)
    state.become(inputs.state)
    return replace(app, inputs=replace(inputs, state=state))


async def _make_room(app: App) -> bool:
    """Give the reserve back for our last words, if the run's folder is ours. Returns: whether it is."""
    ours = await may_write(app.lead, app.lost)
    if ours:
        release_reserve(app.environment.run_dir)
    return ours


async def _end(app: App, ended: State, why: str = "") -> None:
    """Record how the run ended: on disk if the run is ours, in the status, in the log's last line."""
    state = app.inputs.state
    state.status, state.error = ended.value, why
    if await _make_room(app):
        try:
            state.save(app.environment.run_dir / STATE_FILE, lambda: last_look(app.lead))
        except (OSError, TandemError) as error:  # the log still says how the run ended
            log.error("the run's end is not noted", error=words_of(error))
    app.control.enter(ended, why)
    log.info(f"run {ended.value}", iteration=state.iteration, policy_version=state.policy_version, why=why)
