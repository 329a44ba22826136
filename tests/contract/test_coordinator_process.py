"""`python -m coordinator` as a process: exit codes, last log line, SIGTERM, resume."""

import json
import signal
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from servicekit.environment import ServiceEnvironment
from servicekit.lifecycle.exit_codes import EXIT_LOST_TRAINER
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import rows, saved_state, variables_of, with_settings, write_config
from tests.kit.waiting import until

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(environment: ServiceEnvironment, spawn: Start) -> Start:
    """Starts `python -m ...` with the run's environment; ended after the test."""
    return partial(spawn, variables=variables_of(environment), stderr=subprocess.PIPE)


def end_of(process: "subprocess.Popen[str]") -> tuple[int, dict[str, Any]]:
    """Exit code and last log line."""
    _, text = process.communicate(timeout=60)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return process.returncode, json.loads(lines[-1])


def fleet_arguments(environment: ServiceEnvironment) -> tuple[str, ...]:
    return ("tests.fakes.fake_fleet", environment.redis_url, environment.run_id)


def test_a_run_ends_with_zero(config: RunConfig, environment: ServiceEnvironment, start: Start, tmp_path: Path) -> None:
    start(*fleet_arguments(environment))
    code, last = end_of(start("coordinator", "--config", write_config(config, tmp_path)))
    assert (code, last["message"], last["iteration"]) == (0, "run finished", 6)
    assert len(rows(environment)) == 6


def test_sigterm_ends_with_zero_and_keeps_whole_files(
    config: RunConfig, environment: ServiceEnvironment, start: Start, tmp_path: Path
) -> None:
    config = with_settings(config, run={"iterations": 1_000_000})
    start(*fleet_arguments(environment))
    process = start("coordinator", "--config", write_config(config, tmp_path))
    until(lambda: (environment.run_dir / "metrics.jsonl").exists() and len(rows(environment)) > 3, timeout_s=60)
    process.send_signal(signal.SIGTERM)
    code, last = end_of(process)
    assert (code, last["message"], last["why"]) == (0, "run interrupted", "by a signal")
    state = saved_state(environment)
    assert state["status"] == "interrupted"
    assert rows(environment)[-1]["iteration"] == state["iteration"]


def test_a_dead_service_ends_the_run_by_name(
    config: RunConfig, environment: ServiceEnvironment, start: Start, tmp_path: Path
) -> None:
    config = with_settings(config, run={"iterations": 1_000_000}, rollout={"rejoin_timeout_s": 1.0})
    fleet = start(*fleet_arguments(environment))
    process = start("coordinator", "--config", write_config(config, tmp_path))
    until(lambda: (environment.run_dir / "metrics.jsonl").exists() and len(rows(environment)) > 3, timeout_s=60)
    fleet.kill()
    code, last = end_of(process)
    assert (code, last["message"]) == (EXIT_LOST_TRAINER, "run failed")
    assert "rollout-" in last["error"] or "trainer" in last["error"]
    assert saved_state(environment)["error"] == last["error"]


def test_a_coordinator_whose_name_is_taken_says_so_last_and_nothing_else_complains(
    config: RunConfig, environment: ServiceEnvironment, start: Start, tmp_path: Path
) -> None:
    config = with_settings(config, sync={"lease_ttl_s": 0.5})
    registry = Registry(environment.redis_url, environment.run_id)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        registry.announce(ServiceRecord(role="coordinator", name="coordinator", address=address, worker_id="w"), 30)
        process = start("coordinator", "--config", write_config(config, tmp_path))
        _, text = process.communicate(timeout=60)
    registry.close()
    assert process.returncode == 1
    assert "Exception ignored" not in text
    assert "Traceback" not in text
    last = json.loads(text.splitlines()[-1])
    assert last["message"] == "service failed"
    assert last["error"].startswith(f"coordinator 'coordinator' is held by worker 'w' at {address}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("grpo: {group_sise: 4}", "did you mean"),
        ("model: {path: /nowhere}\ndata: {train: /nowhere.jsonl}", "/nowhere"),
    ],
)
def test_a_bad_configuration_ends_with_two(start: Start, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    code, last = end_of(start("coordinator", "--config", str(tmp_path / "config.yaml")))
    assert (code, last["message"]) == (2, "bad configuration")
    assert message in last["error"]
