"""Connects the parts of a run: the loop, its weight sync, dispatch, scoring and checkpoints."""

import uuid
from functools import partial
from typing import TYPE_CHECKING

from coordinator import metrics
from coordinator.checkpoint import Checkpointer
from coordinator.evaluation import Evaluator
from coordinator.events import EventKind, EventLog
from coordinator.forecast import Forecast
from coordinator.joiners import Patience
from coordinator.lead import Lead
from coordinator.loop import GrpoLoop
from coordinator.order import Sampling
from coordinator.roll_call import Group
from coordinator.rollouts import Rollouts
from coordinator.run import Run
from coordinator.scoring import Scorer
from coordinator.services import Services
from coordinator.weights import WeightSync
from servicekit.logs import get_logger

if TYPE_CHECKING:
    from coordinator.app import App

log = get_logger(__name__)


def build_run(app: "App", services: Services, group: Group, lead: Lead) -> Run:
    """Connect the parts of a run."""
    config, inputs = app.config, app.inputs
    weights = _weights(app, services, group, lead)
    rollouts = _rollouts(app, services, weights)
    scorer = Scorer(reward=app.reward, codec=inputs.codec, weight=config.reward.weight)
    loop = GrpoLoop(
        grpo=config.grpo,
        max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
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
        control=app.control,
        leaving=app.leaving,
        events=app.events,
        state=inputs.state,
        resumed=inputs.resumed,
        checkpoint=inputs.checkpoint,
        lead=lead,
        lead_patience_s=config.sync.formation_timeout_s,
    )


def _weights(app: "App", services: Services, group: Group, lead: Lead) -> WeightSync:
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


def _rollouts(app: "App", services: Services, weights: WeightSync) -> Rollouts:
    config = app.config
    return Rollouts(
        services.fleet,
        max_groups_per_call=config.rollout.max_groups_per_call,
        timeout_s=config.rollout.generate_timeout_s,
        patience=Patience(probe_s=config.sync.probe_timeout_s, rejoin_s=config.rollout.rejoin_timeout_s),
        seed=weights.seed_late_joiners,
        tell=partial(_warn_of_fleet, app.events),
    )


def _warn_of_fleet(events: EventLog, message: str) -> None:
    metrics.WARNINGS.labels(kind="replicas").inc()
    events.append(EventKind.WARNING, message)
    log.warning(message)


def _evaluator(app: "App", rollouts: Rollouts, scorer: Scorer) -> Evaluator | None:
    if app.inputs.heldout is None:
        return None
    return Evaluator(prompts=app.inputs.heldout.prompts, rollouts=rollouts, scorer=scorer, sampling=_sampling(app, 0.0))


def _sampling(app: "App", temperature: float) -> Sampling:
    return Sampling(
        temperature=temperature,
        max_new_tokens=app.config.grpo.max_new_tokens,
        stop_token_ids=app.inputs.codec.stop_token_ids,
    )
