"""A coordinator that was stopped for longer than its lease wakes up beside its successor, and ends without a trace."""

import asyncio
import json
import signal
import subprocess
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from coordinator.app import conduct
from coordinator.sync.weight_sync import WeightSync
from servicekit.environment import ServiceEnvironment
from servicekit.errors import Fenced, SlotTaken
from servicekit.rpc.fence import FenceGuard
from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_clients.flow import ReplicaOutcome
from tandem_clients.trainer import Trainer
from tandem_config.schema import RunConfig, SyncSection
from tests.contract.coordinator_runs import rows, saved_state, variables_of, with_settings, write_config
from tests.fakes.fake_fleet import FakeFleet, StaticFleet, announced_fleet, fake_fleet
from tests.fakes.fake_sync import FakeGroup, Fault
from tests.fakes.fake_trainer import FakeTrainer
from tests.fakes.sole_lead import SoleLead
from tests.kit.waiting import until
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import Evicted
from weightsync.round.phases import PREPARE

TTL_S = 1.0
DEADLINE_S = 60.0
Coordinator = subprocess.Popen[str]


@pytest.fixture
def start(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path, spawn: Callable[..., Coordinator]
) -> Callable[[], Coordinator]:
    """Starts `python -m coordinator --resume` processes of one run; ended after the test."""
    settings = with_settings(
        config,
        run={"iterations": 1_000_000, "checkpoint_every": 1, "evaluate_every": 1_000_000},
        sync={"lease_ttl_s": TTL_S},
    )
    command = ("coordinator", "--config", write_config(settings, tmp_path), "--resume")
    logs = (tmp_path / f"{number}.log" for number in count())
    return lambda: spawn(*command, variables=variables_of(environment), stderr=next(logs).open("w"))


async def wait_until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition, DEADLINE_S)


def num_rows(environment: ServiceEnvironment) -> int:
    return len(rows(environment)) if (environment.run_dir / "metrics.jsonl").exists() else 0


async def ends(process: Coordinator, log: Path) -> str:
    """A coordinator that was fenced ends by itself, with 1. Returns: its log."""
    assert await asyncio.to_thread(process.wait, DEADLINE_S) == 1
    return log.read_text()


def leader(fleet: FakeFleet) -> str:
    return fleet.trainer_service.fence._newest.worker_id


async def stop_in_generate(process: Coordinator, fleet: FakeFleet) -> None:
    for service in fleet.rollout_services:
        service.asked.clear()
        service.hold.clear()
    await asyncio.wait_for(fleet.rollout_services[0].asked.wait(), DEADLINE_S)
    process.send_signal(signal.SIGSTOP)
    for service in fleet.rollout_services:
        service.hold.set()


async def stop_in_checkpoint(process: Coordinator, fleet: FakeFleet) -> None:
    fleet.trainer_service.saving.clear()
    fleet.trainer_service.hold.clear()
    await asyncio.wait_for(fleet.trainer_service.saving.wait(), DEADLINE_S)
    process.send_signal(signal.SIGSTOP)
    fleet.trainer_service.hold.set()


async def test_a_paused_coordinator_that_wakes_harms_nothing(
    environment: ServiceEnvironment, start: Callable[[], Coordinator], tmp_path: Path
) -> None:
    reserve = environment.run_dir / ".reserve"
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        first = start()
        await wait_until(lambda: num_rows(environment) >= 2)
        # In generate: it wakes as soon as its successor leads, and would train its samples.
        await stop_in_generate(first, fleet)
        before = leader(fleet)
        second = start()
        await wait_until(lambda: leader(fleet) not in ("", before))
        first.send_signal(signal.SIGCONT)
        assert "run failed" in await ends(first, tmp_path / "0.log")
        assert reserve.exists()  # its successor's
        done = num_rows(environment)
        await wait_until(lambda: num_rows(environment) >= done + 2)
        # In a checkpoint: it wakes when its successor has gone on for a while, and would write its row and mark.
        await stop_in_checkpoint(second, fleet)
        done, third = num_rows(environment), start()
        await wait_until(lambda: num_rows(environment) >= done + 3)
        second.send_signal(signal.SIGCONT)
        assert "run failed" in await ends(second, tmp_path / "1.log")
        assert reserve.exists()
        done = num_rows(environment)
        await wait_until(lambda: num_rows(environment) >= done + 2)
        third.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(third.wait, DEADLINE_S) == 0
        assert not reserve.exists()
    table, state = rows(environment), saved_state(environment)
    assert [row["iteration"] for row in table] == list(range(1, len(table) + 1))
    versions = [row["policy_version"] for row in table]
    assert versions == sorted(set(versions))
    assert (state["status"], state["iteration"], state["error"]) == ("interrupted", len(table), "by a signal")
    for folder in (environment.run_dir / "checkpoints").iterdir():
        if (folder / "complete.json").exists():
            saved = json.loads((folder / "coordinator.json").read_text())["policy_version"]
            assert (folder / "trainer" / "version").read_text() == str(saved)


async def test_one_that_was_stopped_in_the_moment_before_a_write_does_not_write(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis had said that it leads. When it wakes, its lease is over by its own clock, so it asks once more."""
    stopped = threading.Event()

    async def stop(step: int) -> None:
        if step == 3:
            stopped.set()

    def hold(lease: CoordinatorLease) -> None:
        # Redis is asked in another thread; in the loop's own only by the check before a row, or a state, is written.
        if stopped.is_set() and threading.current_thread() is threading.main_thread():
            raise Evicted("another coordinator leads")

    monkeypatch.setattr(CoordinatorLease, "hold", hold)
    monkeypatch.setattr(CoordinatorLease, "left_s", -1.0)
    config = with_settings(config, run={"checkpoint_every": 100, "evaluate_every": 100})
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=stop)):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert [row["iteration"] for row in rows(environment)] == [1, 2]
    state = saved_state(environment)
    assert (state["iteration"], state["status"]) == (2, "running")


async def test_whoever_takes_over_fences_those_that_answer() -> None:
    class Second(SoleLead):
        fence = CoordinatorFence(worker_id="b", token=8)

    async with fake_fleet() as fleet:
        trainer = Trainer(fleet.addresses["trainer"], fence=Second.fence)
        settings = SyncSection(probe_timeout_s=0.5)
        sync = WeightSync(
            trainer=trainer, fleet=StaticFleet(fleet.replicas), group=FakeGroup(), settings=settings, lead=Second()
        )
        await fleet.servers["rollout-1"].drain(0.0)
        await sync.take_over()
        services = (fleet.trainer_service, fleet.rollout_services[0])
        for service in services:
            with pytest.raises(Fenced, match="coordinator b"):
                service.fence.admit(CoordinatorFence(worker_id="a", token=7))
        for service in services:  # a third one was quicker: whoever tells us so, we end
            service.fence.admit(CoordinatorFence(worker_id="c", token=9))
            with pytest.raises(Fenced, match="coordinator c"):
                await sync.take_over()
            fleet.trainer_service.fence = FenceGuard()
        await trainer.close()


async def test_a_rank_that_is_without_its_slot_for_a_while_costs_no_round_that_counts() -> None:
    """Another process held it, as after a fail-over of Redis that has lost the last join: longer than three tries."""
    async with fake_fleet() as fleet:
        fault = Fault(PREPARE, SlotTaken("rank 0: rollout-0/0: another worker holds this slot"))
        fleet.rollout_services[0].sync.faults.extend([fault] * 4)
        sync = WeightSync(
            trainer=fleet.trainer,
            fleet=StaticFleet(fleet.replicas),
            group=FakeGroup(),
            settings=SyncSection(),
            lead=SoleLead(),
            min_replicas=2,
        )
        result = await sync.publish(0)
    assert set(result.outcomes.values()) == {ReplicaOutcome.COMMITTED}
    assert result.attempts == 6  # the other one has its weights after the first
