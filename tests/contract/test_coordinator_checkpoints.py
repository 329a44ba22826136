"""Checkpoints of a run: those that cannot be written, and those that are written while it trains."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from coordinator.app import conduct
from coordinator.ledger.ledger import Ledger
from servicekit.environment import ServiceEnvironment
from servicekit.errors import Internal
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import list_complete, newest_sound
from tests.contract.coordinator_runs import launched_again, rows, saved_state, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.waiting import until
from trainer_service.ranks.handlers import CommandHandlers

FULL = Internal("cannot write checkpoint: No space left on device: 900 MiB are needed, 17 MiB are free")


# run.checkpoint_async, whether the trainer computes on GPUs, and whether it trains while a checkpoint is written.
MODES = pytest.mark.parametrize(
    ("background", "on_gpus", "beside"),
    [(False, True, False), (True, False, True), (None, True, True), (None, False, False)],
    ids=["never", "always", "default on GPUs", "default on CPUs"],
)


pytestmark = pytest.mark.usefixtures("brief_news")


def complete(environment: ServiceEnvironment) -> list[int]:
    return [iteration for iteration, _ in list_complete(environment.run_dir)]


def versions(environment: ServiceEnvironment) -> list[int]:
    """Of the trainer's part of each complete checkpoint."""
    return [int((folder / "trainer" / "version").read_text()) for _, folder in list_complete(environment.run_dir)]


@MODES
async def test_a_run_continues_without_some_of_its_checkpoints(
    config: RunConfig, environment: ServiceEnvironment, background: bool | None, on_gpus: bool, beside: bool
) -> None:
    config = with_settings(config, run={"checkpoint_every": 1, "checkpoint_async": background, "keep_checkpoints": 9})
    trainer = FakeTrainer(on_gpus=on_gpus)
    trainer.save_faults.extend([None, FULL, FULL, None])
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert complete(environment) == versions(environment) == [1, 4, 5, 6]
    state = saved_state(environment)
    assert (state["status"], state["missed_checkpoints"]) == ("finished", [])
    assert state["totals"]["warnings"] >= 2


@MODES
async def test_a_run_ends_after_too_many_missed_in_a_row_and_resumes_from_the_one_before(
    config: RunConfig, environment: ServiceEnvironment, background: bool | None, on_gpus: bool, beside: bool
) -> None:
    config = with_settings(
        config, run={"checkpoint_every": 1, "checkpoint_async": background, "missed_checkpoint_budget": 1}
    )
    trainer = FakeTrainer(on_gpus=on_gpus)
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
    """With default settings, where the trainer computes on GPUs."""
    config = with_settings(config, run={"checkpoint_every": 4})
    trainer = FakeTrainer(on_gpus=True)
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
    config = with_settings(config, run={"checkpoint_every": 2, "iterations": 100})
    trainer, stop = FakeTrainer(on_gpus=True), asyncio.Event()
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


async def test_a_stop_with_too_little_time_for_the_write_leaves_the_one_before(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, run={"checkpoint_every": 1, "iterations": 100, "stop_timeout_s": 1.0})
    trainer, stop = FakeTrainer(on_gpus=True), asyncio.Event()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        await asyncio.to_thread(until, lambda: complete(environment) != [], 60.0)
        trainer.hold.clear()
        trainer.saving.clear()
        await asyncio.wait_for(trainer.saving.wait(), 60)
        before = complete(environment)[-1]
        stop.set()
        assert await asyncio.wait_for(running, 60) == 0
        trainer.hold.set()
    newest = newest_sound(environment.run_dir)
    assert newest is not None
    assert newest.iteration == before < len(trainer.steps)


class _Engine:
    """Says where it computes, and notes how it was to save."""

    policy_version = 3

    def __init__(self, on_gpus: bool) -> None:
        self.on_gpus = on_gpus
        self.begun: list[bool] = []

    def save(self, folder: Path) -> int:
        self.begun.append(False)
        return 1

    def begin_save(self, folder: Path) -> int:
        self.begun.append(True)
        return 1


@MODES
async def test_the_fake_trainer_answers_as_the_real_one(
    tmp_path: Path, background: bool | None, on_gpus: bool, beside: bool
) -> None:
    """What is to be written beside the training is so on both, and both say it."""
    request = pb.SaveCheckpointRequest(
        path=str(tmp_path / "trainer"), background=background is True, background_on_gpus=background is None
    )
    engine: Any = _Engine(on_gpus)
    unused: Any = None
    real = CommandHandlers(engine, unused, tmp_path).save([request.SerializeToString()])
    fake = await FakeTrainer(on_gpus=on_gpus, policy_version=3).SaveCheckpoint(request, None)
    assert engine.begun == [beside]
    assert fake == pb.SaveCheckpointResponse.FromString(real)
    assert fake.writing is beside


@pytest.mark.parametrize("beside", [False, True])
async def test_checkpoints_that_only_the_ledger_wants_may_be_missed_without_end(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """A full disk has room for a step now and then: each time a checkpoint is tried, and does not fit."""
    config = with_settings(config, run={"checkpoint_every": 100, "evaluate_every": 100, "checkpoint_async": beside})
    monkeypatch.setattr(Ledger, "wants_checkpoint", property(lambda ledger: True))
    trainer = FakeTrainer(save_faults=deque([FULL] * 5))
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert complete(environment) == [6]
    assert saved_state(environment)["missed_checkpoints"] == []
