"""The schedule that a configuration asks for."""

from typing import Any

from coordinator.generate.dispatch import Rollouts
from coordinator.schedule.asynchronous import Asynchronous
from coordinator.schedule.one_step_off import OneStepOff
from coordinator.schedule.pipeline import Pipeline
from coordinator.schedule.sync import SyncSchedule
from tandem_config.schema import RunConfig


def chosen(config: RunConfig, sync: SyncSchedule, *, beside_training: Rollouts) -> SyncSchedule:
    """Make the schedule of the parts of the synchronous one.

    Args:
        beside_training: generates while the trainer is at work.
    """
    parts: dict[str, Any] = {**vars(sync), "iterations": config.run.iterations}
    if config.schedule.kind == "sync":
        return sync
    if config.schedule.kind == "one_step_off":
        return OneStepOff(**parts, beside_training=beside_training)
    pipeline, most = pipeline_of(config), config.schedule.max_token_age
    max_token_age = pipeline.max_age if most is None else most
    return Asynchronous(**parts, pipeline=pipeline, max_token_age=max_token_age, drops=config.schedule.stale == "drop")


def pipeline_of(config: RunConfig) -> Pipeline:
    """Make the pipeline of `async`."""
    schedule, batch = config.schedule, config.grpo.prompts_per_iteration
    return Pipeline(
        batch=batch,
        depth=schedule.depth,
        max_staleness=schedule.max_staleness,
        window=schedule.window_groups(batch),
    )


def bounds_of(config: RunConfig) -> tuple[int, int]:
    """Return how old samples may be, and how many waves of prompts may be under way besides the first one."""
    if config.schedule.kind == "async":
        pipeline = pipeline_of(config)
        return pipeline.max_age, pipeline.max_staleness + 1
    ahead = (OneStepOff if config.schedule.kind == "one_step_off" else SyncSchedule).MAX_STALENESS
    return ahead, ahead
