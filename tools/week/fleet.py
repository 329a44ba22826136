"""The fakes of the contract tests as a process that forgets: `python -m tools.week.fleet REDIS_URL RUN_ID`.

A fake keeps every request, for tests to look at; over 100,000 iterations that would be what grows.
"""

import asyncio
import sys
from typing import Any

from servicekit.lifecycle.tasks import cancel
from servicekit.lifecycle.termination import run_main
from tests.fakes.fake_fleet import FakeFleet, announced_fleet
from tests.fakes.fake_sync import FakeSync

_EVERY_S = 1.0
# Newest entries that a fake keeps: a step that is sent again gets its reply.
_KEPT = 64


def forget(fleet: FakeFleet) -> None:
    """Forget all but the newest of what the fakes have seen."""
    trainer = fleet.trainer_service
    for seen in (trainer.steps, trainer.saved, trainer.exported, trainer.measured):
        del seen[:-_KEPT]
    _shorten(trainer._replies)
    _forget_rounds(trainer.sync)
    for rollout in fleet.rollout_services:
        del rollout.requests[:-_KEPT]
        del rollout.phase_calls[:-_KEPT]
        _forget_rounds(rollout.sync)


def _forget_rounds(sync: FakeSync) -> None:
    del sync.seen[:-_KEPT]
    _shorten(sync.counts)


def _shorten(seen: dict[str, Any]) -> None:
    for name in list(seen)[:-_KEPT]:
        del seen[name]


async def _forgetting(fleet: FakeFleet) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        forget(fleet)


async def _serve(stop: asyncio.Event) -> None:
    async with announced_fleet(sys.argv[1], sys.argv[2]) as fleet:
        for rollout in fleet.rollout_services:  # it learns nothing: half of the completions stay wrong
            rollout.first_skill, rollout.skill_per_version = 0.5, 0.0
        forgetting = asyncio.create_task(_forgetting(fleet), name="forgetting")
        try:
            await stop.wait()
        finally:
            await cancel(forgetting)


if __name__ == "__main__":
    sys.exit(run_main("fleet", _serve))
