"""The parts of the process (`App`), and the wiring of a run: schedule, weight sync, dispatch, checkpoints."""

import asyncio
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from coordinator.checkpoints.run_checkpoints import MissedCheckpoints, RunCheckpoints
from coordinator.checkpoints.writing import Checkpointer
from coordinator.data.prompts import PromptSet
from coordinator.fleet.lending import LendingFleet
from coordinator.fleet.services import Services
from coordinator.fleet.view import FleetView
from coordinator.generate.dispatch import Rollouts
from coordinator.generate.joiners import Patience, Seed
from coordinator.generate.turns import Interacting
from coordinator.inputs import Inputs
from coordinator.leader_lease import LeaderCheck, LeaderLease
from coordinator.learn.evaluation import Evaluator, PromptsToEvaluate
from coordinator.learn.scoring import Scorer
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.returning import ReturningTrainer
from coordinator.record.evaluations import Evaluations
from coordinator.record.exporting import Exporter
from coordinator.record.health import logprob_limits
from coordinator.record.progress import Progress
from coordinator.record.replicas_wanted import ReplicasWanted
from coordinator.record.resuming import sampled_by
from coordinator.record.samples.sink import SampleSink
from coordinator.record.sinks import Sink
from coordinator.record.trackers import build_trackers
from coordinator.record.trackers.base import Outcome
from coordinator.rewards.registry import Part
from coordinator.rewards.taken import ShownColumns
from coordinator.run import Run
from coordinator.schedule.choice import bounds_of, chosen
from coordinator.schedule.sync import SyncSchedule
from coordinator.shutdown import Exits, Leaving
from coordinator.sync.forecast import Forecast
from coordinator.sync.participants import WeightGroup
from coordinator.sync.weight_sync import WeightSync
from coordinator.watch import metrics
from coordinator.watch.control import RunControl
from coordinator.watch.events import EventKind, EventLog
from coordinator.watch.fleet_recorder import FleetRecorder
from servicekit.environment import ServiceEnvironment
from servicekit.logs import get_logger
from servicekit.redis.registry import Registry
from servicekit.security.tls import Identity
from tandem_clients.flow import Sampling
from tandem_config.comparing.resuming import mark_of
from tandem_config.schema import EvaluationSet, RunConfig
from tandem_files.digests import text_digest
from tandem_files.metrics_file import METRICS_FILE, MetricsFile
from tandem_files.run_folder import RunIdentity
from tandem_files.samples.folder import SampleFolder
from tandem_files.tokenizer import TextCodec
from weightsync.membership.coordinator_lease import CoordinatorLease

if TYPE_CHECKING:
    from coordinator.fleet.kubernetes.cluster import Cluster

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class App:
    """The parts of the coordinator process that live as long as it does.

    Attributes:
        owner: of the run's folder: this run, with the id that its checkpoints carry.
        reward_facts: what scores depend on, as the rewards were started.
        lost: fails when another coordinator has taken our place; its error says how that was noticed.
        stood_by: another one has led the run, and was waited for.
        others_s: how long to wait for replicas beyond rollout.min_replicas, when these are there.
    """

    config: RunConfig
    environment: ServiceEnvironment
    owner: RunIdentity
    identity: Identity | None
    inputs: Inputs
    rewards: Sequence[Part]
    reward_facts: Mapping[str, str]
    registry: Registry
    lead: CoordinatorLease
    lost: "asyncio.Future[None]"
    events: EventLog
    control: RunControl
    leaving: Leaving
    cluster: "Cluster | None"
    view: FleetView
    observed: FleetRecorder
    exits: Exits = field(default_factory=Exits)
    episodes: Interacting | None = None
    stood_by: bool = False
    others_s: float = math.inf

    @property
    def leading(self) -> LeaderCheck:
        """The check that we lead the run, before anything of it is written."""
        patience_s = self.config.sync.formation_timeout_s
        return LeaderCheck(lease=self.lead, patience_s=patience_s, run_dir=self.environment.run_dir)


def build_run(app: App, services: Services, group: WeightGroup, lead: LeaderLease) -> Run:
    """Connect the parts of a run: its weight group, and our claim to lead it."""
    config, inputs = app.config, app.inputs
    lent, life = app.observed.lent, app.observed.life
    fleet = LendingFleet(services.fleet, keep=max(1, config.rollout.min_replicas), lent=lent, life=life)
    services, lending = replace(services, fleet=fleet), fleet if config.schedule.kind == "async" else None
    weights = _weights(app, services, group, lead)
    rollouts = _rollouts(app, services, weights.seed_late_joiners)
    scorer = build_scorer(config, inputs.data.codec, app.rewards)
    limits = logprob_limits((config.model.dtype, config.sync.dtype), config.grpo.logprob_diff_limit)
    progress = Progress(state=inputs.state, events=app.events, limits=limits, life=app.observed.life)
    rows = MetricsFile(app.environment.run_dir / METRICS_FILE)
    ledger = _ledger(app, progress)
    returning = _returning(app, services, ledger, progress)
    schedule = SyncSchedule(
        grpo=config.grpo,
        sampling=_sampling(config, inputs.data.codec, config.grpo.temperature),
        cursor=inputs.cursor,
        rollouts=rollouts,
        scorer=scorer,
        trainer=returning,
        persist=returning.persist,
        weights=weights,
        ledger=ledger,
        incarnation=uuid.uuid4().hex[:8],
        seed=_seed(config),
        rng=inputs.rng,
        ending=app.leaving.asked,
    )
    return Run(
        settings=config.run,
        logprob_diff_stop=config.grpo.logprob_diff_stop,
        run_dir=app.environment.run_dir,
        schedule=chosen(config, schedule, beside_training=_rollouts(app, services, seed=None)),
        trainer=services.trainer,
        returning=returning,
        evaluations=_evaluations(app, services, scorer, rollouts, lending, progress),
        rows=rows,
        checkpoints=_checkpoints(app, services, progress, rows, ledger),
        exporter=_exporter(app, services, progress),
        control=app.control,
        dropped_prompts=inputs.dropped_prompts(),
        reward_facts=app.reward_facts,
        comparison=inputs.comparison,
        renewal=inputs.renewal,
        leaving=app.leaving,
        state=inputs.state,
        progress=progress,
        resumed=inputs.resumed,
        checkpoint=inputs.checkpoint,
        last=inputs.last,
        lead=app.leading,
        sinks=_sinks(app, progress),
    )


def _ledger(app: App, progress: Progress) -> Ledger:
    config, inputs = app.config, app.inputs
    max_staleness, waves_ahead = bounds_of(config)
    return Ledger(
        run_dir=app.environment.run_dir,
        run_id=app.owner.run_id,
        found=inputs.ledger,
        max_mib=config.run.ledger_max_mib,
        model=sampled_by(inputs.state.model_fingerprint, app.reward_facts),
        rewards=text_digest(json.dumps(app.reward_facts, sort_keys=True)),
        max_staleness=max_staleness,
        waves_ahead=waves_ahead,
        budget=config.run.missed_checkpoint_budget,
        redoes=config.trainer.resumes_exactly,
        check=app.leading.check,
        warn=partial(progress.warn, "ledger"),
    )


def _returning(app: App, services: Services, ledger: Ledger, progress: Progress) -> ReturningTrainer:
    return ReturningTrainer(
        trainer=services.trainer,
        run_dir=app.environment.run_dir,
        until_back=services.until_back if app.config.trainer.resumes_exactly else None,
        ending=app.leaving.asked,
        written=ledger.written,
        warn=partial(progress.warn, "trainer"),
        life=app.observed.life,
    )


def _checkpoints(app: App, services: Services, progress: Progress, rows: MetricsFile, ledger: Ledger) -> RunCheckpoints:
    config, run_dir, state = app.config, app.environment.run_dir, app.inputs.state
    return RunCheckpoints(
        run_dir=run_dir,
        checkpointer=Checkpointer(
            run_dir=run_dir,
            model=str(config.model.path),
            trainer=services.trainer,
            keep=config.run.keep_checkpoints,
            background=config.run.checkpoint_async,
            mark=mark_of(config, app.owner.run_id),
            left=partial(progress.note_left, "checkpoints"),
            check=app.leading.check,
        ),
        missed=MissedCheckpoints(state=state, progress=progress, budget=config.run.missed_checkpoint_budget),
        state=state,
        progress=progress,
        rows=rows,
        ledger=ledger,
        lead=app.leading,
        every=config.run.checkpoint_every,
    )


def _exporter(app: App, services: Services, progress: Progress) -> Exporter:
    return Exporter(
        run_dir=app.environment.run_dir.absolute(),
        trainer=services.trainer,
        every=app.config.run.export_every,
        keep=app.config.run.keep_exports,
        template=app.inputs.data.train.formats.own_template,
        left=partial(progress.note_left, "exports"),
        check=app.leading.check,
    )


def _evaluations(
    app: App,
    services: Services,
    scorer: Scorer,
    rollouts: Rollouts,
    lending: LendingFleet | None,
    progress: Progress,
) -> Evaluations:
    config, data = app.config, app.inputs.data
    beside = _rollouts(app, services, seed=None)
    return Evaluations(
        settings=config.evaluation,
        evaluator=build_evaluator(config, data.codec, data.evaluation, scorer, rollouts, beside_training=beside),
        state=app.inputs.state,
        events=app.events,
        leaving=app.leaving,
        lending=lending,
        warn=progress.warn,
    )


def _sinks(app: App, progress: Progress) -> list[Sink]:
    """Make what gets every finished iteration."""
    loop, note_left = asyncio.get_running_loop(), partial(progress.note_left, "samples")
    config, run_dir, codec = app.config, app.environment.run_dir, app.inputs.data.codec
    least = config.rollout.min_replicas + (config.evaluation.replicas or 0)
    wanted = ReplicasWanted(slots=config.rollout.max_running_requests, least=least, expected=app.view.expected)
    sinks: list[Sink] = [wanted, *build_trackers(config, run_dir, partial(_outcome, app), codec)]
    if config.samples.enabled:
        sinks.append(
            SampleSink(
                folder=SampleFolder(run_dir),
                settings=config.samples,
                codec=codec,
                truncated=config.grpo.truncated,
                taken=ShownColumns.of([part.reward.takes for part in app.rewards], config),
                before_write=app.leading.check,
                left=lambda texts: loop.call_soon_threadsafe(note_left, texts),
            )
        )
    return sinks


def _outcome(app: App) -> Outcome:
    """Return how the run has ended, as it stands when its sinks are closed."""
    if app.inputs.state.status == "finished":
        return "finished"
    return "interrupted" if app.leaving.asked.is_set() else "failed"


def _weights(app: App, services: Services, group: WeightGroup, lead: LeaderLease) -> WeightSync:
    config = app.config
    weights = WeightSync(
        trainer=services.trainer,
        fleet=services.fleet,
        group=group,
        settings=config.sync,
        lead=lead,
        agreement=app.registry,
        min_replicas=config.rollout.min_replicas,
        rejoin_timeout_s=config.rollout.rejoin_timeout_s,
        observed=app.observed,
        forecast=Forecast(str(config.model.path), config.model.dtype, config.sync),
        disk_folder=str(config.sync.published_folder(app.environment.run_dir)),
        ending=app.leaving.asked,
        is_queued=partial(_has_queued_replicas, app),
        warn=partial(_warn_of_fleet, app.events),
    )
    app.view.left_out = weights.left_out
    return weights


def _rollouts(app: App, services: Services, seed: Seed | None) -> Rollouts:
    config = app.config
    return Rollouts(
        fleet=services.fleet,
        max_groups_per_call=config.rollout.max_groups_per_call,
        timeout_s=config.rollout.generate_timeout_s,
        slots=config.rollout.max_running_requests,
        patience=Patience(
            probe_s=config.sync.probe_timeout_s,
            rejoin_s=config.rollout.rejoin_timeout_s,
            is_queued=partial(_has_queued_replicas, app),
        ),
        seed=seed,
        warn=partial(_warn_of_fleet, app.events),
        environments=app.episodes,
    )


def _has_queued_replicas(app: App) -> bool:
    return app.cluster is not None and app.cluster.has_queued_replicas()


def _warn_of_fleet(events: EventLog, message: str) -> None:
    metrics.WARNINGS.labels(kind="replicas").inc()
    events.append(EventKind.WARNING, message)
    log.warning(message)


def build_scorer(config: RunConfig, codec: TextCodec, rewards: Sequence[Part]) -> Scorer:
    """Connect started rewards with the decoding of completions."""
    return Scorer(
        parts=rewards,
        codec=codec,
        stop_ids=config.grpo.stop_token_ids,
        skip_special_tokens=config.rollout.skip_special_tokens,
        environment=config.environment,
    )


def build_evaluator(
    config: RunConfig,
    codec: TextCodec,
    prompts: Mapping[str, PromptSet],
    scorer: Scorer,
    rollouts: Rollouts,
    *,
    beside_training: Rollouts,
) -> Evaluator:
    """Connect the parts of the evaluations.

    Args:
        prompts: by the names of the configuration's sets.
        beside_training: generates while the trainer is at work.
    """
    return Evaluator(
        sets=[
            PromptsToEvaluate(
                name=chosen.name,
                prompts=prompts[chosen.name],
                num_prompts=chosen.num_prompts,
                num_samples=chosen.samples,
                sampling=_sampling_of_set(config, codec, chosen),
                measures=tuple(chosen.metrics()),
                every=config.run.evaluate_every if chosen.every is None else chosen.every,
            )
            for chosen in config.evaluation_sets()
        ],
        rollouts=rollouts,
        rollouts_beside_training=beside_training,
        scorer=scorer,
        right_from=config.evaluation.right_from,
        seed=_seed(config),
    )


def _sampling_of_set(config: RunConfig, codec: TextCodec, chosen: EvaluationSet) -> Sampling:
    return replace(
        _sampling(config, codec, chosen.temperature),
        max_new_tokens=config.grpo.max_new_tokens if chosen.max_new_tokens is None else chosen.max_new_tokens,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
    )


def _sampling(config: RunConfig, codec: TextCodec, temperature: float) -> Sampling:
    grpo = config.grpo
    stop_ids = tuple(sorted({*codec.stop_token_ids, *grpo.stop_token_ids}))
    return Sampling(
        temperature=temperature, max_new_tokens=grpo.max_new_tokens, stop_token_ids=stop_ids, stop=grpo.stop
    )


def _seed(config: RunConfig) -> int | None:
    return config.run.seed if config.rollout.seeded else None
