"""A second coordinator waits under the lease, takes over what is left of the first, and ends with the run."""

import asyncio
import contextlib
import json
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.environment import ServiceEnvironment
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG
from servicekit.redis import client as redis_client
from tandem_config.schema import ASYNC_DEFAULTS, RunConfig
from tandem_files.leader import FAILURES_FILE, LEADER_FILE, read_leader
from tandem_files.ledger.reading import read_ledger
from tandem_files.ledger.records import FORMAT, Record, framed, segment
from tests.contract.coordinator_runs import (
    groups_asked,
    rows,
    saved_state,
    trained,
    variables_of,
    with_settings,
    write_config,
)
from tests.fakes.fake_fleet import FakeFleet, announced_fleet
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.processes import free_port
from tests.kit.waiting import until
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Rendezvous

TTL_S = 1.0
DEADLINE_S = 90.0
Coordinator = subprocess.Popen[str]
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {
        "schedule": {"kind": "async"},
        "grpo": {"correction": "importance"},
        "sync": ASYNC_DEFAULTS["sync"],
        "evaluation": ASYNC_DEFAULTS["evaluation"],
    },
}
ENDLESS = {"iterations": 1_000_000, "checkpoint_every": 3, "evaluate_every": 1_000_000}


class Coordinators:
    """Processes `python -m coordinator --resume`, which log to numbered files."""

    def __init__(
        self, config: RunConfig, environment: ServiceEnvironment, folder: Path, spawn: Callable[..., Coordinator]
    ) -> None:
        self.config = with_settings(config, run=ENDLESS, sync={"lease_ttl_s": TTL_S})
        self.environment, self._folder, self._spawn = environment, folder, spawn
        self._numbers = count()

    def start(
        self, *options: str, config: RunConfig | None = None, variables: Mapping[str, str] | None = None
    ) -> Coordinator:
        number = next(self._numbers)
        folder = self._folder / str(number)
        folder.mkdir()
        command = ("coordinator", "--config", write_config(config or self.config, folder), "--resume", *options)
        given = {**variables_of(self.environment), **(variables or {})}
        return self._spawn(*command, variables=given, stderr=(folder / "log").open("w"))

    def standby(self, *options: str, **given: Any) -> Coordinator:
        return self.start("--standby", *options, **given)

    def log(self, number: int) -> str:
        return (self._folder / str(number) / "log").read_text()

    async def waits(self, number: int) -> None:
        await soon(lambda: "standby: waiting for the lead" in self.log(number))

    def num_rows(self) -> int:
        return len(rows(self.environment)) if (self.environment.run_dir / "metrics.jsonl").exists() else 0

    async def advance(self, by: int = 2) -> None:
        done = self.num_rows()
        try:
            await soon(lambda: self.num_rows() >= done + by)
        except AssertionError as error:
            logs = "\n".join(self.log(number)[-3000:] for number in range(len(list(self._folder.glob("[0-9]")))))
            raise AssertionError(f"{self.num_rows()} rows, {done} before: {logs}") from error


@pytest.fixture
def coordinators(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path, spawn: Callable[..., Coordinator]
) -> Coordinators:
    return Coordinators(config, environment, tmp_path, spawn)


async def soon(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition, DEADLINE_S)


async def code_of(process: Coordinator) -> int:
    return await asyncio.to_thread(process.wait, DEADLINE_S)


def led_by(fleet: FakeFleet) -> str:
    return fleet.trainer_service.fence._newest.worker_id


async def stop_while_groups_finish(process: Coordinator, fleet: FakeFleet, number: signal.Signals) -> None:
    """Send a signal while one replica has finished groups and the other one holds its."""
    slow = fleet.rollout_services[1]
    slow.asked.clear()
    slow.hold.clear()
    await asyncio.wait_for(slow.asked.wait(), DEADLINE_S)
    process.send_signal(number)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_standby_takes_over_and_generates_no_finished_group_again(
    coordinators: Coordinators, number: signal.Signals, schedule: str
) -> None:
    coordinators.config = with_settings(coordinators.config, **SCHEDULES[schedule])
    environment = coordinators.environment
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        first = coordinators.standby("--retry-exit", "75")  # the empty slot is its own
        await coordinators.advance()
        second = coordinators.standby()
        await coordinators.waits(1)
        before = led_by(fleet)
        await stop_while_groups_finish(first, fleet, number)
        await soon(lambda: led_by(fleet) not in ("", before))
        asked_before = groups_asked(fleet)
        ledger = read_ledger(environment.run_dir).account
        finished = {
            name
            for wave in ledger.open_waves()
            for name, is_finished in ledger.open_groups(wave).items()
            if is_finished
        }
        fleet.rollout_services[1].hold.set()
        await coordinators.advance(3)
        assert not {name for name in groups_asked(fleet) - asked_before if name in finished}
        if number == signal.SIGSTOP:
            first.send_signal(signal.SIGCONT)
            assert await code_of(first) == 75, "a Job would count it over its whole life"
            assert not (environment.run_dir / FAILURES_FILE).exists()
        await coordinators.advance()
        second.terminate()
        assert await code_of(second) == 0
        assert fleet.trainer_service.restored == []  # it has continued after the last iteration
        assert set(trained(fleet.trainer_service).values()) == {1}
    assert read_ledger(environment.run_dir, "t").problems == []
    assert [row["iteration"] for row in rows(environment)] == list(range(1, coordinators.num_rows() + 1))
    state = saved_state(environment)
    leader = read_leader(environment.run_dir)
    assert (state["status"], state["fence"]) == ("interrupted", leader and leader.token)


async def test_what_a_stopped_leader_has_saved_is_taken_over_before_its_lease_is_over(
    coordinators: Coordinators,
) -> None:
    """The leader gives its lease up. With this one, waiting for its end would take longer than the test."""
    config = with_settings(coordinators.config, **SCHEDULES["async"])
    coordinators.config = with_settings(config, sync={"lease_ttl_s": 4 * DEADLINE_S})
    environment = coordinators.environment
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        first = coordinators.start("--interrupted-exit", "143")
        await coordinators.advance()
        second = coordinators.standby("--interrupted-exit", "143")
        await coordinators.waits(1)
        first.terminate()
        assert await code_of(first) == 143
        await coordinators.advance()
        second.terminate()
        assert await code_of(second) == 143
        assert fleet.trainer_service.restored == []
    assert [row["iteration"] for row in rows(environment)] == list(range(1, coordinators.num_rows() + 1))


async def test_of_two_that_wait_one_leads_and_the_other_waits_on(coordinators: Coordinators) -> None:
    environment = coordinators.environment
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        first = coordinators.start()
        await coordinators.advance()
        others = [coordinators.standby("--interrupted-exit", "143") for _ in range(2)]
        for number in (1, 2):
            await coordinators.waits(number)
        before = led_by(fleet)
        first.kill()
        await soon(lambda: led_by(fleet) not in ("", before))
        await coordinators.advance()
        assert [process.poll() for process in others] == [None, None]
        (waiting,) = [n for n in (1, 2) if "claimed slot" not in coordinators.log(n)]
        others[waiting - 1].terminate()
        assert await code_of(others[waiting - 1]) == 143
        assert "without having led the run" in coordinators.log(waiting)
        await coordinators.advance()


async def test_a_leader_that_lives_keeps_the_lead_over_a_redis_without_data(coordinators: Coordinators) -> None:
    environment = coordinators.environment
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        coordinators.start()
        await coordinators.advance()
        standby = coordinators.standby()
        await coordinators.waits(1)
        before = led_by(fleet)
        redis_client.connect(environment.redis_url).flushall()
        await coordinators.advance(5)
        assert led_by(fleet) == before
        assert standby.poll() is None


async def test_a_standby_ends_with_a_run_that_is_finished(coordinators: Coordinators) -> None:
    environment = coordinators.environment
    coordinators.config = with_settings(coordinators.config, run={"iterations": 4})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        slow = fleet.rollout_services[0]
        slow.hold.clear()
        first = coordinators.start()
        await asyncio.wait_for(slow.asked.wait(), DEADLINE_S)
        standby = coordinators.standby()
        await coordinators.waits(1)
        slow.hold.set()
        assert [await code_of(first), await code_of(standby)] == [0, 0]
        assert "the run is finished" in coordinators.log(1)
        # And one that is started afterwards finds it so.
        assert await code_of(coordinators.standby()) == 0
    assert saved_state(environment)["status"] == "finished"


@pytest.mark.parametrize(
    ("options", "failures", "codes"),
    [
        ((), 0, [1, 1]),
        (("--retry-exit", "75"), 6, [4, 4]),
    ],
    ids=["without a Job", "given up"],
)
async def test_a_standby_ends_with_a_run_that_has_failed(
    coordinators: Coordinators, options: tuple[str, ...], failures: int, codes: list[int]
) -> None:
    environment = coordinators.environment
    (environment.run_dir / FAILURES_FILE).write_text(json.dumps({"iteration": 0, "failures": failures}))
    held = asyncio.Event()

    async def fail(step: int) -> None:
        await held.wait()
        raise RuntimeError("planted")

    trainer = FakeTrainer(before_step=fail)
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        first = coordinators.start(*options)
        await soon(lambda: (environment.run_dir / LEADER_FILE).exists())
        standby = coordinators.standby(*options)
        await coordinators.waits(1)
        held.set()
        assert [await code_of(first), await code_of(standby)] == codes
    assert "standby ends" in coordinators.log(1)
    assert "planted" in coordinators.log(1)


async def test_a_failed_attempt_is_repeated_by_the_standby(coordinators: Coordinators) -> None:
    environment, failures = coordinators.environment, ["planted"]
    held = asyncio.Event()

    async def fail(step: int) -> None:
        if failures:
            await held.wait()
            raise RuntimeError(failures.pop())

    trainer = FakeTrainer(before_step=fail)
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        first = coordinators.start("--retry-exit", "75")
        await soon(lambda: (environment.run_dir / LEADER_FILE).exists())
        coordinators.standby("--retry-exit", "75")
        await coordinators.waits(1)
        held.set()
        assert await code_of(first) == 75
        await coordinators.advance()


async def test_a_standby_that_leads_and_cannot_read_the_run_says_that_it_ends(coordinators: Coordinators) -> None:
    """It is no spare then, and no lease of its own says that the run continues without it."""
    environment = coordinators.environment
    async with announced_fleet(environment.redis_url, environment.run_id):
        leader = coordinators.start()
        await coordinators.advance()
        standby = coordinators.standby("--retry-exit", "75")
        await coordinators.waits(1)
        head = Record(kind="segment", fields={"format": FORMAT + 1, "account": {}})
        segment(environment.run_dir, 10**6).write_bytes(framed(head))
        leader.kill()
        assert await code_of(standby) == EXIT_BAD_CONFIG
    assert "was written by a newer release of Tandem" in coordinators.log(1)
    assert "the run continues without it" not in coordinators.log(1)
    group = Rendezvous(environment.redis_url, f"tandem:{environment.run_id}")
    assert COORDINATOR_SLOT not in group.snapshot().members


async def refused(coordinators: Coordinators, options: tuple[str, ...], code: int, **given: Any) -> str:
    """Start a standby that does not fit beside a leader, which it does not harm. Returns: its log."""
    environment = coordinators.environment
    async with announced_fleet(environment.redis_url, environment.run_id):
        first = coordinators.start()
        await coordinators.advance()
        standby = coordinators.standby(*options, **given)
        assert await code_of(standby) == code, coordinators.log(1)
        await coordinators.advance()
        assert first.poll() is None
    return coordinators.log(1)


@pytest.mark.parametrize(("options", "code"), [((), 2), (("--retry-exit", "75"), 75)], ids=["alone", "in a Job"])
async def test_one_with_another_configuration_says_in_what(
    coordinators: Coordinators, options: tuple[str, ...], code: int
) -> None:
    other = with_settings(coordinators.config, run={"iterations": 999})
    log = await refused(coordinators, options, code, config=other)
    assert "leads the run with another configuration: run.iterations" in log
    assert "999" in log


@pytest.mark.parametrize(("options", "code"), [((), 2), (("--retry-exit", "75"), 75)], ids=["alone", "in a Job"])
async def test_one_whose_configuration_cannot_be_used_ends_no_job(
    coordinators: Coordinators, tmp_path: Path, options: tuple[str, ...], code: int
) -> None:
    other = coordinators.config.model_copy(
        update={"model": coordinators.config.model.model_copy(update={"path": tmp_path / "none"})}
    )
    assert str(tmp_path / "none") in await refused(coordinators, options, code, config=other)


async def test_one_with_another_folder_under_the_same_path_says_so(coordinators: Coordinators, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    log = await refused(coordinators, (), 2, variables={"TANDEM_RUN_DIR": str(other)})
    assert f"{other / LEADER_FILE} does not name it" in log
    assert not (other / "state.json").exists()


async def test_one_of_another_run_says_so(coordinators: Coordinators) -> None:
    log = await refused(coordinators, (), 2, variables={"TANDEM_RUN_ID": "other"})
    assert "is the folder of run 't'" in log


async def test_one_that_waits_is_alive_and_not_ready_and_no_second_coordinator(coordinators: Coordinators) -> None:
    environment = coordinators.environment
    ports = {"TANDEM_HEALTH_PORT": str(free_port()), "TANDEM_METRICS_PORT": str(free_port())}
    async with announced_fleet(environment.redis_url, environment.run_id):
        first = coordinators.start()
        await coordinators.advance()
        coordinators.standby(variables=ports)
        await coordinators.waits(1)

        def health(name: str) -> int:
            with grpc.insecure_channel(f"127.0.0.1:{ports['TANDEM_HEALTH_PORT']}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status)

        def metrics() -> dict[str, float]:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports['TANDEM_METRICS_PORT']}/metrics", timeout=5) as page:
                lines = page.read().decode().splitlines()
            return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

        def is_ready() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return health("readiness") == int(health_pb2.HealthCheckResponse.SERVING)
            return False

        alive = health_pb2.HealthCheckResponse.SERVING
        assert (await asyncio.to_thread(health, "liveness"), await asyncio.to_thread(is_ready)) == (alive, False)
        waiting = await asyncio.to_thread(metrics)
        assert waiting["tandem_standby"] == 1
        assert not [name for name in waiting if name.startswith("tandem_run_state")]
        first.kill()
        await soon(is_ready)
        leading = await asyncio.to_thread(metrics)
        assert leading["tandem_standby"] == 0
        assert [name for name in leading if name.startswith("tandem_run_state")]
