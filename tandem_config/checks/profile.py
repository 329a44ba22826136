"""Checks of the profiled steps and ranks."""

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig


@check(
    "profile.ranks",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.data_parallel",
    "trainer.context_parallel",
)
def _ranks_exist(config: RunConfig) -> Problems:
    beyond = [rank for rank in config.profile.ranks if rank >= config.trainer.world_size]
    if beyond:
        yield problem(
            "profile.ranks",
            list(config.profile.ranks),
            f"names rank {beyond[0]}; the trainer has {config.trainer.world_size}, counted from 0",
            f"use 0 to {config.trainer.world_size - 1}, or [] for all",
        )


@check("profile.every", "profile.steps")
def _series_do_not_overlap(config: RunConfig) -> Problems:
    profile = config.profile
    if profile.every is not None and profile.every < profile.steps:
        yield problem(
            "profile.every",
            profile.every,
            f"is less than profile.steps, {profile.steps}: a series would begin within the one before",
            f"set profile.every: {profile.steps} or more (that many: every step)",
        )


@check("profile.first", "profile.steps", "run.iterations")
def _steps_are_in_the_run(config: RunConfig) -> Problems:
    profile = config.profile
    if profile.steps > 0 and profile.first > config.run.iterations:
        yield problem(
            "profile.first",
            profile.first,
            f"is after the last step: the run has {config.run.iterations} (run.iterations), one per iteration",
            f"use 1 to {config.run.iterations}",
        )
