"""Services that have too much to do, and say so: the run's clients wait for as long as they are asked to."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.app import conduct
from coordinator.web.server import fresh
from servicekit.environment import ServiceEnvironment
from servicekit.errors import Overloaded, Unavailable
from tandem_clients import trainer as client
from tandem_clients.flow import TrainBatch
from tandem_clients.probing import NoAnswer, while_alive
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import rows
from tests.fakes.fake_fleet import announced_fleet, fake_fleet
from tests.fakes.fake_rollout import GenerateFault
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.waiting import until


def busy(after_s: float = 0.1) -> Overloaded:
    error = Overloaded("as much to do as it takes")
    error.after_s = after_s
    return error


async def test_a_run_waits_for_busy_services(config: RunConfig, environment: ServiceEnvironment) -> None:
    trainer = FakeTrainer()
    trainer.faults.extend([busy(), busy(), busy(), None, Unavailable("lost"), busy()])
    async with announced_fleet(environment.redis_url, environment.run_id, trainer) as fleet:
        fleet.rollout_services[0].faults.append(GenerateFault(after_groups=1, error=busy()))
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert [row["policy_version"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6]
    assert not trainer.faults


async def test_a_trainer_that_stays_busy_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BUSY_S", 0.3)
    async with fake_fleet() as fleet:
        fleet.trainer_service.faults.extend([busy() for _ in range(100)])
        batch = TrainBatch(step_id="s", policy_version=0, updates=())
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        with pytest.raises(Overloaded, match="trainer: as much to do as it takes") as caught:
            await fleet.trainer.train_step(batch)
        assert caught.value.after_s == 0.1
        assert 0.3 < clock() - begun_s < 10
        # Three or four attempts, each after a pause, and not one after the other.
        assert 90 < len(fleet.trainer_service.faults) < 99


@pytest.mark.parametrize(("error", "is_lost"), [(busy(), False), (Unavailable("connection refused"), True)])
async def test_a_busy_service_is_not_a_lost_one(error: Unavailable, is_lost: bool) -> None:
    asked = 0

    async def status(*, timeout_s: float) -> Any:
        nonlocal asked
        asked += 1
        raise error

    async def call() -> str:
        await asyncio.to_thread(until, lambda: asked > 2)
        return "done"

    service: Any = SimpleNamespace(name="rollout-0", status=status)
    if is_lost:
        with pytest.raises(NoAnswer):
            await while_alive(call(), service, probe_timeout_s=0.02)
    else:
        assert await while_alive(call(), service, probe_timeout_s=0.02) == "done"


def test_a_snapshot_is_taken_a_few_times_a_second_however_many_ask() -> None:
    taken: list[int] = []

    def snapshot() -> dict[str, Any]:
        taken.append(0)
        return {"iteration": 1}

    ask = fresh(snapshot)
    for _ in range(1000):
        ask()
    assert 1 <= len(taken) <= 4
    before = len(taken)
    until(lambda: ask() and len(taken) > before, 5)
