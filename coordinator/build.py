"""The parts of the process (`App`), and the wiring of a run: loop, weight sync, dispatch, checkpoints."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from coordinator.fleet.services import Services
from coordinator.fleet.view import FleetView
from coordinator.generate.joiners import Patience
from coordinator.generate.order import Sampling
from coordinator.generate.rollouts import Rollouts
from coordinator.inputs import Inputs
from coordinator.lead import Lead, last_look
from coordinator.learn.evaluation import Evaluator
from coordinator.learn.rewards.registry import Part
from coordinator.learn.scoring import Scorer
from coordinator.leaving import Leaving
from coordinator.loop import GrpoLoop
from coordinator.record.checkpoint import Checkpointer
from coordinator.record.exporting import Exporter
from coordinator.record.samples import SampleSink
from coordinator.record.sinks import Sink
from coordinator.record.trackers.base import Outcome
from coordinator.record.trackers.registry import build_trackers
from coordinator.run import Run
from coordinator.sync.forecast import Forecast
from coordinator.sync.roll_call import WeightGroup
from coordinator.sync.weights import WeightSync
from coordinator.watch import metrics
from coordinator.watch.control import RunControl
from coordinator.watch.events import EventKind, EventLog
from coordinator.watch.observed import Observed
from servicekit.environment import ServiceEnvironment
from servicekit.logs import get_logger
from servicekit.redis.registry import Registry
from servicekit.security.tls import Identity
from tandem_config.schema import RunConfig
from tandem_files.samples.folder import SampleFolder
from weightsync.group.coordinator_lease import CoordinatorLease

if TYPE_CHECKING:
    from coordinator.fleet.kubernetes.cluster import Cluster

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class App:
    """The parts of the coordinator process that live as long as it does.

    Attributes:
        lost: fails when another coordinator has taken our place; its error says how that was noticed.
    """

    config: RunConfig
    environment: ServiceEnvironment
    identity: Identity | None
    inputs: Inputs
    rewards: Sequence[Part]
    registry: Registry
    lead: CoordinatorLease
    lost: "asyncio.Future[None]"
    events: EventLog
    control: RunControl
    leaving: Leaving
    cluster: "Cluster | None"
    view: FleetView
    observed: Observed


def build_run(app: App, services: Services, group: WeightGroup, lead: Lead) -> Run:
    """Connect the parts of a run.

    Args:
        group: the weight group of the run.
        lead: our claim to be the run's only coordinator.
    """
    config, inputs = app.config, app.inputs
    weights = _weights(app, services, group, lead)
    rollouts = _rollouts(app, services, weights)
    scorer = Scorer(parts=app.rewards, codec=inputs.codec)
    loop = GrpoLoop(
        grpo=config.grpo,
        sampling=_sampling(app, config.grpo.temperature),
        cursor=inputs.cursor,
        rollouts=rollouts,
        scorer=scorer,
        trainer=services.trainer,
        weights=weights,
        incarnation=uuid.uuid4().hex[:8],
        rng=inputs.rng,
    )
    return Run(
        settings=config.run,
        logprob_diff_limit=config.grpo.logprob_diff_limit,
        logprob_diff_stop=config.grpo.logprob_diff_stop,
        run_dir=app.environment.run_dir,
        loop=loop,
        evaluator=_evaluator(app, rollouts, scorer),
        checkpointer=Checkpointer(
            run_dir=app.environment.run_dir,
            model=str(config.model.path),
            trainer=services.trainer,
            keep=config.run.keep_checkpoints,
        ),
        exporter=Exporter(
            run_dir=app.environment.run_dir,
            trainer=services.trainer,
            every=config.run.export_every,
            keep=config.run.keep_exports,
        ),
        control=app.control,
        dropped_prompts=inputs.dropped_prompts(),
        leaving=app.leaving,
        events=app.events,
        state=inputs.state,
        resumed=inputs.resumed,
        checkpoint=inputs.checkpoint,
        lead=lead,
        lead_patience_s=config.sync.formation_timeout_s,
        sinks=_sinks(app, lead),
    )


def _sinks(app: App, lead: Lead) -> list[Sink]:
    """Make what gets every finished iteration."""
    config, run_dir = app.config, app.environment.run_dir
    sinks: list[Sink] = [*build_trackers(config, run_dir, partial(_outcome, app))]
    if config.samples.enabled:
        sinks.append(
            SampleSink(
                folder=SampleFolder(run_dir),
                settings=config.samples,
                codec=app.inputs.codec,
                truncated=config.grpo.truncated,
                last_look=partial(last_look, lead),
            )
        )
    return sinks


def _outcome(app: App) -> Outcome:
    """Return how the run has ended, as it stands when its sinks are closed."""
    if app.inputs.state.status == "finished":
        return "finished"
    return "interrupted" if app.leaving.asked.is_set() else "failed"


def _weights(app: App, services: Services, group: WeightGroup, lead: Lead) -> WeightSync:
    config = app.config
    return WeightSync(
        trainer=services.trainer,
        fleet=services.fleet,
        group=group,
        settings=config.sync,
        lead=lead,
        min_replicas=config.rollout.min_replicas,
        rejoin_timeout_s=config.rollout.rejoin_timeout_s,
        observed=app.observed,
        forecast=Forecast(str(config.model.path), config.model.dtype, config.sync),
        disk_folder=str(config.sync.published_folder(app.environment.run_dir)),
    )


def _rollouts(app: App, services: Services, weights: WeightSync) -> Rollouts:
    config = app.config
    return Rollouts(
        services.fleet,
        max_groups_per_call=config.rollout.max_groups_per_call,
        timeout_s=config.rollout.generate_timeout_s,
        patience=Patience(probe_s=config.sync.probe_timeout_s, rejoin_s=config.rollout.rejoin_timeout_s),
        seed=weights.seed_late_joiners,
        warn=partial(_warn_of_fleet, app.events),
    )


def _warn_of_fleet(events: EventLog, message: str) -> None:
    metrics.WARNINGS.labels(kind="replicas").inc()
    events.append(EventKind.WARNING, message)
    log.warning(message)


def _evaluator(app: App, rollouts: Rollouts, scorer: Scorer) -> Evaluator | None:
    if app.inputs.heldout is None:
        return None
    return Evaluator(prompts=app.inputs.heldout, rollouts=rollouts, scorer=scorer, sampling=_sampling(app, 0.0))


def _sampling(app: App, temperature: float) -> Sampling:
    return Sampling(
        temperature=temperature,
        max_new_tokens=app.config.grpo.max_new_tokens,
        stop_token_ids=app.inputs.codec.stop_token_ids,
    )
