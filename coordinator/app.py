"""Wiring of the coordinator process: its long-lived parts, its servers, and the order in which they end."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from coordinator.build import App
from coordinator.environments.conversations import environments_of, started_environment, tools_of
from coordinator.fleet.arrivals import note_arrivals
from coordinator.fleet.view import FleetView
from coordinator.inputs import Inputs, differences_from_run, read_inputs
from coordinator.leader_lease import RunOver, Standby, check_lease, is_led
from coordinator.record.health import logprob_limits
from coordinator.record.metrics_row import numeric
from coordinator.record.resuming import reward_facts
from coordinator.retries import as_leader, run_or_stop, say_how_it_ended
from coordinator.rewards.registry import Part, build_rewards, close_rewards, start_rewards
from coordinator.servicer import FULL_NAME, CoordinatorServicer
from coordinator.shutdown import Exits, Leaving
from coordinator.watch import metrics
from coordinator.watch.control import RunControl, State
from coordinator.watch.events import EventLog
from coordinator.watch.fleet_recorder import FleetRecorder
from coordinator.watch.life import Life
from coordinator.web.history import History
from coordinator.web.samples import SamplePages
from coordinator.web.server import DATA, EARLIER, SAMPLES, PageServer, fresh, on_loop
from coordinator.web.snapshot import Source
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, TandemError
from servicekit.lifecycle.announcing import announce
from servicekit.lifecycle.garbage import collect_from_now_on
from servicekit.lifecycle.tasks import cancel, failing, first_of
from servicekit.lifecycle.termination import watch
from servicekit.logs import get_logger
from servicekit.metrics import Scrapes, export_disk_of, serve_metrics
from servicekit.redis.records import PAGE_URL, AgreedSettings
from servicekit.rpc.server import GrpcServer
from servicekit.security.run_token import own_token, page_key
from servicekit.security.tls import Identity
from tandem_api.coordinator.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from tandem_config.comparing.agreeing import agreed_settings
from tandem_config.schema import RunConfig
from tandem_files.metrics_file import METRICS_FILE, Baseline, MetricsFile
from tandem_files.run_folder import RunIdentity, claim_run_dir, scale_of
from tandem_files.samples.folder import SampleFolder
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import Rendezvous

if TYPE_CHECKING:
    from coordinator.fleet.kubernetes.cluster import Cluster

# Long enough for watchers to read the last events, short enough not to delay the exit noticeably.
_DRAIN_S = 2.0
DEFAULT_EXITS = Exits()
log = get_logger(__name__)


async def conduct(
    config: RunConfig,
    environment: ServiceEnvironment,
    *,
    resume: bool,
    stop: asyncio.Event,
    exits: Exits = DEFAULT_EXITS,
    standby: bool = False,
) -> int:
    """Run the coordinator until the run is over or `stop` is set.

    Args:
        resume: continue from the newest complete checkpoint.
        exits: codes of a run that is interrupted or has failed.
        standby: wait until no other coordinator leads the run, then resume it.
    Returns: the exit code: 0 finished, 3 failed since the trainer was lost, 1 failed otherwise, or what `exits` says.
    Raises: ConfigError: a file or the environment cannot be used; nothing was started.
    """
    identity = environment.identity("coordinator")
    async with AsyncExitStack() as stack:
        try:
            owner = await asyncio.to_thread(claim_run_dir, environment.run_dir, environment.run_id)
            pool = await stack.enter_async_context(started_environment(config, environment.run_id, identity, stop))
            inputs = await asyncio.to_thread(
                partial(read_inputs, config, environment.run_dir, resume=resume or standby, deep=not standby),
                episodes=tools_of(pool),
            )
            episodes = environments_of(config, pool, inputs.data.train.formats)
            rewards = await _ready_rewards(config, inputs, identity, stop)
        except ConfigError as error:
            is_spare = standby and await asyncio.to_thread(is_led, environment, unknown=True)
            if exits.retry is not None and not is_spare:  # a Job, which takes this for the end of the run
                await asyncio.to_thread(release_unled, config, environment, f"bad configuration: {error}")
            raise
        stack.push_async_callback(close_rewards, rewards)
        app = await _assemble(config, environment, owner, identity, inputs, rewards)
        app = replace(app, exits=exits, episodes=episodes, stood_by=standby)
        scrapes = Scrapes()
        metrics_port = serve_metrics(environment.bind_host, environment.metrics_port, scrapes)
        collect_from_now_on()  # a standby may wait for days
        if standby:
            over = await _stand_by(app, stop)
            if over is not None or stop.is_set():
                log.info("standby ends without having led the run", why="by a signal" if over is None else over.why)
                return exits.interrupted if over is None else over.code
            try:
                app = await as_leader(app)
            except BaseException:  # it is no spare beside another, and must not be taken for one
                await _close(app)
                raise
        return await _serve_and_run(app, stop, scrapes, metrics_port)


async def _assemble(
    config: RunConfig,
    environment: ServiceEnvironment,
    owner: RunIdentity,
    identity: Identity | None,
    inputs: Inputs,
    rewards: list[Part],
) -> App:
    registry = await environment.open_registry(AgreedSettings(agreed_settings(config)))
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    group = await asyncio.to_thread(Rendezvous, environment.redis_url, f"tandem:{environment.run_id}")
    events, observed = EventLog(), FleetRecorder(Life(environment.run_dir))
    cluster = await asyncio.to_thread(_reach_cluster, config, environment, events)
    return App(
        config=config,
        environment=environment,
        owner=owner,
        identity=identity,
        inputs=inputs,
        rewards=rewards,
        reward_facts=await asyncio.to_thread(reward_facts, config),
        registry=registry,
        lead=CoordinatorLease(group, config.sync.lease_ttl_s, failing(lost), environment.worker_id),
        lost=lost,
        events=events,
        control=RunControl(events),
        leaving=Leaving(),
        cluster=cluster,
        view=FleetView(cluster, partial(scale_of, environment.run_dir, config.rollout.replicas), observed.lent),
        observed=observed,
    )


async def _stand_by(app: App, stop: asyncio.Event) -> RunOver | None:
    """Wait for the lead, alive and not ready. Returns and raises as Standby.wait; without the lead all is closed."""
    config, environment = app.config, app.environment
    metrics.STANDBY.set(1)
    metrics.RUN_STATE.clear()  # the leader says it
    server = GrpcServer("coordinator", bind=environment.bind, health_bind=environment.health_bind)
    await server.start()
    differences = partial(differences_from_run, config, environment.run_dir)
    standby = Standby(
        *(app.lead, environment.run_dir, config.sync.lease_ttl_s, differences), retried=app.exits.retry is not None
    )
    over: RunOver | None = None
    leads = False
    try:
        if app.cluster is not None:
            await app.cluster.look_on()
        over = await standby.wait(stop)
        leads = over is None and not stop.is_set()
    finally:
        metrics.STANDBY.set(0)
        await server.drain(0.0)
        if not leads:
            await _close(app)
    app.control.show()
    return over


async def _close(app: App) -> None:
    """Let go of the cluster, of the lead, and of Redis."""
    if app.cluster is not None:
        app.cluster.close()
    await asyncio.to_thread(app.lead.close)
    await asyncio.to_thread(app.registry.close)


async def _serve_and_run(app: App, stop: asyncio.Event, scrapes: Scrapes, metrics_port: int) -> int:
    async with AsyncExitStack() as stack:
        if app.cluster is not None:
            stack.callback(app.cluster.close)
        overview = fresh((await _overview(app, stack)).snapshot)
        _note_arrivals(app, stack)
        await _serve_page(app, overview, stack)
        server = await _serve(app, overview, stop, metrics_port, stack)
        try:
            code = await run_or_stop(app, stop)
        finally:
            app.events.close()
            await server.drain(_DRAIN_S)
            await asyncio.to_thread(app.lead.close)
            await asyncio.to_thread(app.registry.close)
        # Alerts learn from it whether the run has finished, or its coordinator is lost.
        await scrapes.last(stop)
    if app.inputs.state.status == State.FAILED.value:  # what was logged since is no reason
        say_how_it_ended(app.inputs.state)
    return code


async def _ready_rewards(
    config: RunConfig, inputs: Inputs, identity: Identity | None, stop: asyncio.Event
) -> list[Part]:
    """Start the rewards before any service is called; when asked to stop meanwhile, the run ends before it scores.

    Raises: ConfigError: a reward cannot work; none is left running.
    """
    try:
        rewards = build_rewards(config, identity)
        await first_of({"started": start_rewards(rewards, inputs.scans()), "stop": stop})
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return rewards


def _reach_cluster(config: RunConfig, environment: ServiceEnvironment, events: EventLog) -> "Cluster | None":
    """Connect to the cluster of a fleet of pods; else None, without the import of its client, which takes a second."""
    if config.fleet.kind != "kubernetes":
        return None
    from coordinator.fleet.kubernetes.cluster import reach_cluster

    return reach_cluster(config, environment, events)


def release_unled(config: RunConfig, environment: ServiceEnvironment, why: str) -> None:
    """Release the GPUs of a run that cannot begin, unless a coordinator holds its lease. Logs what fails. Blocking."""
    if config.fleet.kind != "kubernetes" or config.fleet.release_after_s is None:
        return
    try:
        cluster = _reach_cluster(config, environment, EventLog())
        group = Rendezvous(environment.redis_url, f"tandem:{environment.run_id}")
        lead = CoordinatorLease(group, config.sync.lease_ttl_s)
        lead.claim(2 * config.sync.lease_ttl_s)
        try:
            if cluster is not None:
                cluster.api.before_change = partial(check_lease, lead)
                cluster.release(why)
        finally:
            lead.close()
    except TandemError as error:
        log.warning("gpus not released", error=str(error))


async def _serve(
    app: App, overview: Callable[[], dict[str, Any]], stop: asyncio.Event, metrics_port: int, stack: AsyncExitStack
) -> GrpcServer:
    """Serve status and events from the start, so that a watcher sees which services the run waits for."""
    environment = app.environment
    export_disk_of(environment.run_dir)
    metrics.EXPECTED_REPLICAS.set_function(app.view.expected)
    metrics.RUN_START.set(app.inputs.state.started_s)
    metrics.SCHEDULE.labels(kind=app.config.schedule.kind).set(1)
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
        overview=overview,
    )
    server.add(add_CoordinatorServiceServicer_to_server, servicer, FULL_NAME)
    address = await server.start()
    record = environment.record("coordinator", "coordinator", address, metrics_port)
    announcing = announce(app.registry, record, app.config.sync.lease_ttl_s, stop, failing(app.lost))
    if app.stood_by:  # whoever led before may have the name for a while, e.g. if it is frozen
        task = asyncio.create_task(announcing, name="announce")
        watch(task, lambda error: failing(app.lost)(f"not announced: {error}"))
        stack.push_async_callback(cancel, task)
    else:
        try:
            await announcing
        except BaseException:
            await server.drain(0.0)  # before the loop ends, on which gRPC would complain of it
            raise
    server.set_ready(True)
    return server


async def _overview(app: App, stack: AsyncExitStack) -> Source:
    """Make the source of the run's overview, for the web page and `tandem top`, and follow events from now on."""
    environment, state = app.environment, app.inputs.state
    rows = await asyncio.to_thread(MetricsFile(environment.run_dir / METRICS_FILE).rows)
    since = Baseline(renewed=state.renewed)
    done = state.iteration if app.inputs.last is None else app.inputs.last.state.iteration
    history = History([numeric(since.comparable(row)) for row in rows if (row["iteration"] or 0) <= done])
    stack.push_async_callback(cancel, asyncio.create_task(history.follow(app.events), name="history"))
    return Source(
        run=app.config.run.name,
        total_iterations=app.config.run.iterations,
        evaluate_every=app.config.run.evaluate_every,
        checkpoint_every=app.config.run.checkpoint_every,
        limits=logprob_limits((app.config.model.dtype, app.config.sync.dtype), app.config.grpo.logprob_diff_limit),
        run_dir=environment.run_dir,
        control=app.control,
        state=state,
        history=history,
        observed=app.observed,
        troubles=app.view.troubles,
    )


def _note_arrivals(app: App, stack: AsyncExitStack) -> None:
    """Note for the overview which services are awaited."""

    def is_starting() -> bool:
        return app.control.state is State.STARTING

    work = note_arrivals(app.config, app.registry, app.observed, is_starting, app.view.replicas)
    stack.push_async_callback(cancel, asyncio.create_task(work, name="arrivals"))


async def _serve_page(app: App, overview: Callable[[], dict[str, Any]], stack: AsyncExitStack) -> None:
    """Serve the run's web page, if a port is set. Its address goes to the registry, where the launcher finds it."""
    environment = app.environment
    if environment.web_port is None:
        return
    samples = SamplePages(SampleFolder(environment.run_dir))
    page = PageServer(
        environment.bind_host,
        environment.web_port,
        {
            DATA: on_loop(overview, asyncio.get_running_loop()),
            SAMPLES: samples.groups,
            EARLIER: samples.earlier,
        },
        key=page_key(own_token()),
        advice="set TANDEM_WEB_PORT to a free port or to 0",
    )
    stack.push_async_callback(asyncio.to_thread, page.close)
    url = f"http://{environment.advertised(page.port)}/"
    await asyncio.to_thread(app.registry.set_value, PAGE_URL, url)
    log.info("web page served", url=url)
