"""The run's life over coordinators: who came, was lost and came back, why, and its cost; as status and page show it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.web.folder import FolderSource
from launcher.view.status import describe
from servicekit.environment import ServiceEnvironment
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig
from tandem_files.ledger.life import LifeEntry, read_life
from tests.contract.test_coordinator_standby import TTL_S, Coordinator, Coordinators, code_of, soon
from tests.contract.test_returning_trainer import restarts_at
from tests.fakes.fake_fleet import FakeFleet, announced, announced_fleet, served
from tests.fakes.fake_rollout import FakeRollout, GenerateFault
from tests.kit.waiting import throughout

# Until what was streamed has come, and until the registry has been looked at.
ARRIVES_S, SEEN_S = 0.5, 2.5


@pytest.fixture
def coordinators(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path, spawn: Callable[..., Coordinator]
) -> Coordinators:
    return Coordinators(config, environment, tmp_path, spawn)


def kinds(environment: ServiceEnvironment) -> list[tuple[str, str]]:
    return [(entry.who, entry.kind) for entry in read_life(environment.run_dir, 50)]


async def noted(environment: ServiceEnvironment, *wanted: tuple[str, str]) -> None:
    await soon(lambda: set(wanted) <= set(kinds(environment)))


async def kill_while_it_samples(environment: ServiceEnvironment, fleet: FakeFleet, name: str) -> None:
    """End a replica in the middle of completions of which it has streamed two tokens each; it says why."""
    replica = fleet.rollout_services[int(name[-1])]
    replica.faults.append(GenerateFault(0, partial=2))
    await soon(lambda: not replica.faults)
    await asyncio.to_thread(throughout, lambda: True, ARRIVES_S)
    other = await asyncio.to_thread(Registry, environment.redis_url, environment.run_id)
    await asyncio.to_thread(other.report_failure, "rollout", name, "out of memory\nat last")
    await asyncio.to_thread(other.close)
    await asyncio.to_thread(fleet.registries[name].withdraw)
    await asyncio.to_thread(throughout, lambda: (name, "replica lost") not in kinds(environment), SEEN_S)
    await fleet.servers[name].drain(0.0)


@pytest.mark.timeout(180)
async def test_the_life_of_a_run_outlives_its_coordinators(coordinators: Coordinators) -> None:
    environment = coordinators.environment
    redis_url, run_id, run_dir = environment.redis_url, environment.run_id, environment.run_dir
    back = FakeRollout(name="rollout-1")
    async with announced_fleet(redis_url, run_id, ttl_s=TTL_S) as fleet, served(back) as (_, address):
        first = coordinators.standby()
        await noted(environment, ("rollout-0", "replica joined"), ("rollout-1", "replica joined"))
        await kill_while_it_samples(environment, fleet, "rollout-1")
        await noted(environment, ("rollout-1", "replica lost"))
        async with announced(redis_url, run_id, "rollout-1", address, ttl_s=TTL_S):
            await noted(environment, ("rollout-1", "replica back"))
            restarts_at(fleet, run_dir, {1})
            await noted(environment, ("trainer", "trainer back"))
            second = coordinators.standby()
            await coordinators.waits(1)
            first.kill()
            await noted(environment, ("coordinator", "coordinator took over"))
            await coordinators.advance()
            second.terminate()
            assert await code_of(second) == 0
    life = read_life(run_dir, 50)
    check_in_order(life)
    check_shown(run_dir, life)


def check_in_order(life: list[LifeEntry]) -> None:
    assert [(entry.who, entry.kind) for entry in life] == [
        ("coordinator", "coordinator started"),
        ("rollout-0", "replica joined"),
        ("rollout-1", "replica joined"),
        ("rollout-1", "replica lost"),
        ("rollout-1", "replica back"),
        ("trainer", "trainer lost"),
        ("trainer", "trainer back"),
        ("coordinator", "coordinator took over"),
        ("coordinator", "coordinator ended"),
    ]
    started, _, joined, lost, came, trainer_lost, trainer_back, took_over, ended = life
    assert (started.why, started.seconds, started.tokens) == ("from the beginning", None, 0)
    assert joined.why == "at the start"
    assert lost.why == "out of memory at last"
    assert lost.tokens
    assert lost.tokens % 8 == 0, "four completions of each group had two tokens"
    assert came.why == "a new process"
    # From the moment on at which its stream broke: until then more of its tokens could come.
    assert came.seconds is not None
    assert came.time_s - lost.time_s < came.seconds < came.time_s - joined.time_s - ARRIVES_S - SEEN_S
    assert "step starts from" in trainer_lost.why
    assert "done again" in trainer_back.why
    assert trainer_back.seconds == pytest.approx(trainer_back.time_s - trainer_lost.time_s, abs=0.01)
    assert took_over.why.startswith("after iteration ")
    assert took_over.tokens == 0
    assert took_over.seconds is not None
    assert TTL_S / 3 < took_over.seconds < took_over.time_s - trainer_back.time_s
    assert ended.why == "interrupted: by a signal"
    assert ended.totals["replica lost"] == [1, 0.0, lost.tokens]
    assert ended.totals["replica joined"][0] == 2
    assert ended.totals["coordinator took over"] == [1, took_over.seconds, 0]
    assert (ended.lost, ended.serve) == ({}, ["rollout-0", "rollout-1"])


def check_shown(run_dir: Path, life: list[LifeEntry]) -> None:
    lines = describe(run_dir, {})
    assert [text for name, text in lines if name == "life"] == [str(entry) for entry in life]
    text = str(life[3])
    assert text.endswith(f"rollout-1 lost: out of memory at last ({life[3].tokens} tokens)")
    so_far = [text for name, text in lines if name == "so far"]
    assert f"replica lost: 1x ({life[3].tokens} tokens)" in so_far
    shown = json.loads(json.dumps(FolderSource(run_dir).picture()))
    assert [(who, kind) for _, who, kind, *_ in shown["life"]] == [(entry.who, entry.kind) for entry in life]
    assert shown["life"][3][3:] == ["out of memory at last", None, life[3].tokens]
    assert shown["life_totals"]["replica joined"][0] == 2
