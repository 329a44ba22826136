"""What a simulated run of so many replicas does in each iteration, as replicas_wanted measures it."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from coordinator.record.replicas_wanted import IterationWork
from coordinator.schedule.choice import chosen
from launcher.simulate import world as module
from launcher.simulate.world import ServiceSpeeds, simulate
from tandem_config.schema import RunConfig


def lengths(median: float, p99: float, most: int) -> Any:
    """4,096 lengths of a long tail."""
    sigma = np.log(p99 / median) / 2.326
    return np.clip(np.random.default_rng(0).lognormal(np.log(median), sigma, 4096), 1, most).astype(np.int64)


def config_of(kind: str, replicas: int, prompts: int, most: int) -> RunConfig:
    grpo = {"prompts_per_iteration": prompts, "group_size": 8, "max_new_tokens": most}
    return RunConfig.model_validate(
        {
            "model": {"path": "/model"},
            "data": {"train": "/data.jsonl"},
            "grpo": {**grpo, "preset": "decoupled"},
            "rollout": {"replicas": replicas},
            "schedule": {"kind": kind},
        }
    )


@cache
def works(
    kind: str, replicas: int, *, prompts: int, train_s: float, slots: int = 4, row_s: float = 0.0, most: int = 400
) -> tuple[IterationWork, ...]:
    """Iterations of a run whose engines take 10 ms for a step, and `row_s` for each row of it.

    Args:
        slots: completions that a replica runs at a time.
    """
    worlds, generations = list[module._World](), list[Any]()

    class Watched(module._World):
        def __post_init__(self) -> None:
            super().__post_init__()
            worlds.append(self)

    def recorded(*arguments: Any, **options: Any) -> Any:
        schedule = chosen(*arguments, **options)
        iterate = schedule.iterate

        async def note(*given: Any) -> Any:
            record = await iterate(*given)
            generations.append(record.generation)
            return record

        object.__setattr__(schedule, "iterate", note)
        return schedule

    speeds = ServiceSpeeds(
        slots=slots,
        step_s=0.01,
        row_s=row_s,
        train_s=train_s,
        sync_s=0.05,
        reward_s=0.0,
        lengths=lengths(60, 300, most),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_World", Watched)
        patch.setattr(module, "chosen", recorded)
        simulate(config_of(kind, replicas, prompts, most), speeds, 8, kind)
    done = zip(worlds[0].iterations, generations, strict=True)
    return tuple(
        IterationWork(compute_s=one.trained_s, running_s=made.running_s, most_running=made.most_running)
        for one, made in done
    )[4:]
