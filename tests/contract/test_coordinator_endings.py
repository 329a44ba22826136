"""How the coordinator ends before its time: a stop that saves, a full disk, a trainer that does not answer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.errors import NotFinite
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_LOST_TRAINER
from servicekit.redis import client
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import newest_sound
from tandem_files.ledger.life import read_life
from tests.contract.coordinator_runs import launched_again, rows, saved_state, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.folders import fill, small_disk
from tests.kit.waiting import until
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Rendezvous

SELDOM = {"checkpoint_every": 100, "evaluate_every": 100, "iterations": 100}


class Gate:
    """Holds a trainer's step `at` until it is opened."""

    def __init__(self, at: int) -> None:
        self.at, self.reached, self.opened = at, asyncio.Event(), asyncio.Event()

    async def __call__(self, step: int) -> None:
        if step == self.at:
            self.reached.set()
            await self.opened.wait()


def checkpointed(environment: ServiceEnvironment) -> int | None:
    sound = newest_sound(environment.run_dir)
    return None if sound is None else sound.iteration


async def test_a_stop_between_steps_saves_what_is_finished(config: RunConfig, environment: ServiceEnvironment) -> None:
    """With iterations since the last checkpoint: none of them is lost, and a resume goes on behind them."""
    stop, held, config = asyncio.Event(), asyncio.Event(), with_settings(config, run=SELDOM)

    async def hold(step: int) -> None:
        if step == 3:
            for service in fleet.rollout_services:
                service.hold.clear()
                service.asked.clear()
            held.set()

    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=hold)) as fleet:
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        await asyncio.wait_for(held.wait(), 30)
        await asyncio.wait_for(fleet.rollout_services[0].asked.wait(), 10)
        stop.set()
        assert await asyncio.wait_for(running, 10) == 0
        for service in fleet.rollout_services:
            service.hold.set()
    assert saved_state(environment)["status"] == "interrupted"
    assert checkpointed(environment) == 3
    again = launched_again(environment, "again")
    async with announced_fleet(again.redis_url, again.run_id, FakeTrainer(policy_version=3)):
        assert (
            await conduct(with_settings(config, run={"iterations": 4}), again, resume=True, stop=asyncio.Event()) == 0
        )
    assert [row["iteration"] for row in rows(again)] == [1, 2, 3, 4]


async def test_a_stop_within_a_step_finishes_its_iteration(config: RunConfig, environment: ServiceEnvironment) -> None:
    """The trainer is ahead of the run's state by then: only the whole iteration can be saved. No evaluation follows."""
    stop, gate = asyncio.Event(), Gate(at=2)
    config = with_settings(config, run={**SELDOM, "evaluate_every": 2})
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=gate)):
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        await asyncio.wait_for(gate.reached.wait(), 30)
        stop.set()
        gate.opened.set()
        assert await asyncio.wait_for(running, 10) == 0
    assert [row["heldout_accuracy"] for row in rows(environment)] == [None, None]
    assert checkpointed(environment) == 2


async def test_a_stop_waits_for_no_replica_that_is_lost(config: RunConfig, environment: ServiceEnvironment) -> None:
    """Of all that die between a train step and its sync: the step is saved, and nobody waits for run.stop_timeout_s."""
    stop, gate = asyncio.Event(), Gate(at=2)
    config = with_settings(config, run=SELDOM, sync={"formation_timeout_s": 60}, rollout={"rejoin_timeout_s": 600})
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=gate)) as fleet:
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        await asyncio.wait_for(gate.reached.wait(), 30)
        for service in fleet.rollout_services:
            await fleet.servers[service.name].drain(0.0)
        stop.set()
        gate.opened.set()
        assert await asyncio.wait_for(running, 20) == 0
    assert saved_state(environment)["status"] == "interrupted"
    assert [row["sync_redundancy"] for row in rows(environment)] == [1.0, None]
    assert checkpointed(environment) == 2


async def test_a_stop_while_no_replica_is_left_to_generate(config: RunConfig, environment: ServiceEnvironment) -> None:
    """Dispatch waits rollout.rejoin_timeout_s for one to join; a run that is to end does not."""

    def stalls() -> float:
        return REGISTRY.get_sample_value("tandem_dispatch_stalls_total") or 0.0

    async def lose_replicas(step: int) -> None:
        for service in fleet.rollout_services if step == 2 else ():
            service.hold.clear()
            service.asked.clear()

    stop, before = asyncio.Event(), stalls()
    config = with_settings(config, run=SELDOM, sync={"formation_timeout_s": 60}, rollout={"rejoin_timeout_s": 600})
    trainer = FakeTrainer(before_step=lose_replicas)
    async with announced_fleet(environment.redis_url, environment.run_id, trainer) as fleet:
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        for service in fleet.rollout_services:
            await asyncio.wait_for(service.asked.wait(), 30)
        await asyncio.to_thread(until, lambda: len(trainer.steps) == 2, 30.0)
        for service in fleet.rollout_services:
            await asyncio.wait_for(service.asked.wait(), 30)
            await fleet.servers[service.name].drain(0.0)
            service.hold.set()
        await asyncio.to_thread(until, lambda: stalls() > before, 60.0)
        stop.set()
        assert await asyncio.wait_for(running, 20) == 0
    assert checkpointed(environment) == 2


async def test_a_stop_has_its_time(config: RunConfig, environment: ServiceEnvironment) -> None:
    stop, gate = asyncio.Event(), Gate(at=2)
    config = with_settings(config, run={**SELDOM, "stop_timeout_s": 0.2})
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=gate)):
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        await asyncio.wait_for(gate.reached.wait(), 30)
        stop.set()
        assert await asyncio.wait_for(running, 10) == 0
        gate.opened.set()
    assert saved_state(environment)["status"] == "interrupted"
    assert checkpointed(environment) is None


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "4m") as folder:
        yield folder


@pytest.mark.parametrize("every", [100, 3], ids=["in a row", "in a checkpoint"])
async def test_a_full_disk_fails_by_name_and_the_run_goes_on_when_there_is_room(
    config: RunConfig, environment: ServiceEnvironment, disk: Path, every: int
) -> None:
    async def full(step: int) -> None:
        if step == 3:
            fill(disk)

    run = {"checkpoint_every": every, "evaluate_every": 100, "full_disk_timeout_s": 0.5}
    config = with_settings(config, run=run)
    environment = environment.model_copy(update={"run_dir": disk / "run"})
    environment.run_dir.mkdir()
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=full)):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    state = saved_state(environment)
    assert state["status"] == "failed"
    assert "No space left on device" in state["error"]
    assert str(environment.run_dir) in state["error"]
    # whole rows only; where a row fits into the last block of its file, it is the state that does not
    assert [row["iteration"] for row in rows(environment)] in ([1, 2], [1, 2, 3])
    (disk / "filler").unlink()
    again = launched_again(environment, "again")
    async with announced_fleet(again.redis_url, again.run_id):
        assert await conduct(config, again, resume=True, stop=asyncio.Event()) == 0
    assert [row["iteration"] for row in rows(again)] == [1, 2, 3, 4, 5, 6]
    assert not (environment.run_dir / ".reserve").exists()


async def test_a_run_waits_for_room_on_its_disk(
    config: RunConfig, environment: ServiceEnvironment, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(step: int) -> None:
        if step == 3:
            fill(disk)

    config = with_settings(config, run={"checkpoint_every": 100, "evaluate_every": 100})
    environment = environment.model_copy(update={"run_dir": disk / "run"})
    environment.run_dir.mkdir()
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=full)):
        run = asyncio.create_task(conduct(config, environment, resume=False, stop=asyncio.Event()))
        await asyncio.to_thread(until, lambda: "waiting 600 s (run.full_disk_timeout_s) for room" in caplog.text, 30.0)
        (disk / "filler").unlink()
        async with asyncio.timeout(60.0):
            assert await run == 0
    assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6]
    lost, room = [entry for entry in read_life(environment.run_dir, 50) if entry.who == "disk"]
    assert (lost.kind, room.kind) == ("disk full", "disk room")
    assert "No space left on device" in lost.why
    assert room.seconds == pytest.approx(room.time_s - lost.time_s, abs=0.01)


async def test_a_coordinator_that_does_not_lead_leaves_the_reserve_of_the_one_that_does(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, sync={"lease_ttl_s": 0.3})
    group = Rendezvous(environment.redis_url, f"tandem:{environment.run_id}")
    group.lead(COORDINATOR_SLOT, "the one that leads", 60.0)
    environment.run_dir.mkdir(exist_ok=True)
    reserve = environment.run_dir / ".reserve"
    reserve.write_bytes(b"its own")
    async with announced_fleet(environment.redis_url, environment.run_id):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert reserve.read_bytes() == b"its own"


async def test_a_trainer_that_does_not_answer_is_what_has_failed(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """As a frozen one: `tandem run` must start it again, and not believe that the run has failed."""
    gate = Gate(at=2)
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=gate)) as fleet:
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=asyncio.Event()))
        await asyncio.wait_for(gate.reached.wait(), 30)
        await fleet.servers["trainer"].drain(0.0)
        assert await asyncio.wait_for(running, 60) == EXIT_LOST_TRAINER
        gate.opened.set()
    assert saved_state(environment)["error"].endswith("the trainer does not answer")


async def test_a_restarted_coordinator_goes_on_with_min_replicas(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """One of two is away for good: the run goes on in a lease's time, not after run.startup_timeout_s, nor never."""
    config = with_settings(config, run={"startup_timeout_s": 60}, sync={"lease_ttl_s": 1.0})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.trainer_service.faults.extend([None, None, NotFinite("planted")])
        assert await conduct(config, environment, resume=True, stop=asyncio.Event()) == EXIT_FAILED
        fleet.registries["rollout-1"].withdraw()
        with client.connect(environment.redis_url) as redis:  # which has lost who led the run
            redis.delete(f"{{tandem:{environment.run_id}}}:state")
        asked = len(fleet.rollout_services[1].requests)
        assert await asyncio.wait_for(conduct(config, environment, resume=True, stop=asyncio.Event()), 40) == 0
        assert len(fleet.rollout_services[1].requests) == asked
    assert len(rows(environment)) == 6


@pytest.mark.parametrize("standby", [False, True])
async def test_a_run_that_has_not_begun_waits_for_all_replicas_however_it_is_started(
    config: RunConfig, environment: ServiceEnvironment, standby: bool
) -> None:
    """Compose and clusters start every attempt with --resume, and a standby leads immediately if it is the first."""
    config = with_settings(config, run={"startup_timeout_s": 3.0}, sync={"lease_ttl_s": 0.5})
    clock = asyncio.get_running_loop().time
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.registries["rollout-1"].withdraw()
        group = Rendezvous(environment.redis_url, f"tandem:{environment.run_id}")
        lead = CoordinatorLease(group, 0.5)  # that of a coordinator which was killed while it waited
        lead.claim(0.0)
        lead.close()
        begun_s = clock()
        assert await conduct(config, environment, resume=True, stop=asyncio.Event(), standby=standby) == 0
        assert clock() - begun_s > 3.0
    assert len(rows(environment)) == 6


async def test_a_coordinator_that_was_killed_waits_for_no_replica_that_is_away(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """Its predecessor has led in this Redis: whoever lives is announced there."""
    config = with_settings(config, run={"startup_timeout_s": 60}, sync={"lease_ttl_s": 60.0})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.trainer_service.faults.extend([None, None, NotFinite("planted")])
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == EXIT_FAILED
        fleet.registries["rollout-1"].withdraw()
        async with asyncio.timeout(30.0):
            assert await conduct(config, environment, resume=True, stop=asyncio.Event()) == 0
    assert len(rows(environment)) == 6


async def test_a_new_run_waits_for_all_replicas(config: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(config, run={"startup_timeout_s": 1.0}, sync={"lease_ttl_s": 0.2})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.registries["rollout-1"].withdraw()
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert "rollout-1" in saved_state(environment)["error"]
