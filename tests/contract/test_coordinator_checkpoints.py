"""Checkpoints of a run: those that cannot be written, and those that are written while it trains."""

import asyncio
from pathlib import Path

import pytest

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.errors import Internal
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import list_complete, newest_sound
from tests.contract.coordinator_runs import launched_again, rows, saved_state, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.waiting import until

FULL = Internal("cannot write checkpoint: No space left on device: 900 MiB are needed, 17 MiB are free")


def complete(environment: ServiceEnvironment) -> list[int]:
    return [iteration for iteration, _ in list_complete(environment.run_dir)]


def versions(environment: ServiceEnvironment) -> list[int]:
    """Of the trainer's part of each complete checkpoint."""
    return [int((folder / "trainer" / "version").read_text()) for _, folder in list_complete(environment.run_dir)]


@pytest.mark.parametrize("background", [False, True])
async def test_a_run_continues_without_some_of_its_checkpoints(
    config: RunConfig, environment: ServiceEnvironment, background: bool
) -> None:
    config = with_settings(config, run={"checkpoint_every": 1, "checkpoint_async": background, "keep_checkpoints": 9})
    trainer = FakeTrainer()
    trainer.save_faults.extend([None, FULL, FULL, None])
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert complete(environment) == versions(environment) == [1, 4, 5, 6]
    state = saved_state(environment)
    assert (state["status"], state["missed_checkpoints"]) == ("finished", [])
    assert state["totals"]["warnings"] >= 2


@pytest.mark.parametrize("background", [False, True])
async def test_a_run_ends_after_too_many_missed_in_a_row_and_resumes_from_the_one_before(
    config: RunConfig, environment: ServiceEnvironment, background: bool
) -> None:
    config = with_settings(
        config, run={"checkpoint_every": 1, "checkpoint_async": background, "missed_checkpoint_budget": 1}
    )
    trainer = FakeTrainer()
    trainer.save_faults.extend([None, FULL, FULL])
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    state = saved_state(environment)
    assert state["status"] == "failed"
    assert "2 checkpoints in a row were not written" in state["error"]
    assert "900 MiB are needed, 17 MiB are free" in state["error"]
    assert complete(environment) == [1]
    again = launched_again(environment, "again")
    async with announced_fleet(again.redis_url, again.run_id):
        assert await conduct(config, again, resume=True, stop=asyncio.Event()) == 0
    assert [row["iteration"] for row in rows(again)] == [1, 2, 3, 4, 5, 6]
    assert saved_state(again)["missed_checkpoints"] == []


async def test_the_run_trains_while_a_checkpoint_is_written_and_waits_at_its_end(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, run={"checkpoint_every": 4, "checkpoint_async": True})
    trainer = FakeTrainer()
    trainer.hold.clear()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=asyncio.Event()))
        await asyncio.to_thread(until, lambda: len(trainer.steps) == 6, 60.0)
        assert complete(environment) == []
        assert not running.done()
        trainer.hold.set()
        assert await asyncio.wait_for(running, 60) == 0
    assert complete(environment) == versions(environment) == [4, 6]


async def test_a_stop_waits_for_the_checkpoint_that_is_written(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, run={"checkpoint_every": 2, "checkpoint_async": True, "iterations": 100})
    trainer, stop = FakeTrainer(), asyncio.Event()
    trainer.hold.clear()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        await asyncio.wait_for(trainer.saving.wait(), 60)
        stop.set()
        await asyncio.to_thread(until, lambda: len(trainer.steps) >= 2, 60.0)
        trainer.hold.set()
        assert await asyncio.wait_for(running, 60) == 0
    newest = newest_sound(environment.run_dir)
    assert newest is not None
    assert newest.iteration == len(trainer.steps)
    assert Path(newest.folder, "trainer", "version").read_text() == str(newest.iteration)
