"""What a person sees first when a service cannot start: one line that names it; `tandem status` shows it, too."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.security.certificates import role_name
from tandem_config.comparing.agreeing import agreed_settings
from tandem_config.loading import load_config
from tandem_files.run_folder import claim_run_dir
from tests.kit.certificates import DAY, Authority, variables, write_files
from tests.kit.folders import write_data, write_small_model

pytestmark = pytest.mark.integration
SERVICES = {
    "coordinator": ["coordinator"],
    "trainer": ["trainer_service"],
    "rollout-0": ["rollout_service", "--name", "rollout-0"],
}
# The coordinator starts within a second, the engines' services within several: theirs are for `make test-all`.
EACH = ["coordinator", *(pytest.param(name, marks=pytest.mark.slow) for name in ("trainer", "rollout-0"))]
REDIS_PASSWORD = "do-not-show"


class Ended:
    """How a process has ended: code, and its log's lines of WARNING and above."""

    def __init__(self, code: int, text: str) -> None:
        records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        self.code = code
        self.text = text
        self.errors = [each for each in records if each["level"] in ("warning", "error", "critical")]

    @property
    def first(self) -> str:
        assert self.errors, f"no error line in:\n{self.text}"
        return f"{self.errors[0]['message']}: {self.errors[0].get('error', '')}"


Run = Callable[..., Ended]


@pytest.fixture
def base(tmp_path: Path, redis_server: str) -> dict[str, str]:
    """A good environment."""
    (tmp_path / "run").mkdir()
    return {"REDIS_URL": redis_server, "TANDEM_RUN_ID": "t", "TANDEM_RUN_DIR": str(tmp_path / "run")}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A good configuration."""
    return {
        "run": {"name": "t", "startup_timeout_s": 1},
        "model": {"path": str(write_small_model(tmp_path / "model"))},
        "data": {"train": str(write_data(tmp_path / "train.jsonl", [(number, 11) for number in range(10, 50)]))},
    }


@pytest.fixture
def run(tmp_path: Path, base: dict[str, str], config: dict[str, Any]) -> Iterator[Run]:
    """`run("trainer", "--option", REDIS_URL=None)`: starts a service to its end; None takes a variable away."""
    started: list[subprocess.Popen[str]] = []

    def start(service: str, *options: str, **changes: str | None) -> Ended:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **base, **changes}
        module, *arguments = SERVICES[service]
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(path), *arguments, *options],
            env={name: value for name, value in environment.items() if value is not None},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        _, text = process.communicate(timeout=120)
        return Ended(process.returncode, text)

    yield start
    for process in started:
        process.kill()


def status(base: dict[str, str]) -> str:
    """What `tandem status` says where a service is."""
    command = [sys.executable, "-m", "launcher", "status"]
    return subprocess.run(
        command, env={**os.environ, **base, "COLUMNS": "500"}, capture_output=True, text=True, timeout=120
    ).stdout


@pytest.mark.parametrize("service", EACH)
def test_a_missing_secret_is_named(run: Run, service: str) -> None:
    ended = run(service, REDIS_URL=None)
    assert ended.code == 2
    assert ended.first.startswith("bad configuration: environment variable REDIS_URL is not set")


@pytest.mark.slow
def test_every_missing_variable_is_in_the_first_line(run: Run) -> None:
    first = run("coordinator", REDIS_URL=None, TANDEM_RUN_ID=None, TANDEM_RUN_DIR="/dev/null").first
    for name in ("REDIS_URL is not set", "TANDEM_RUN_ID is not set", "TANDEM_RUN_DIR='/dev/null' is wrong"):
        assert name in first


def test_an_unreachable_redis_is_said_at_once_then_waited_for(run: Run) -> None:
    ended = run("coordinator", REDIS_URL=f"redis://tandem:{REDIS_PASSWORD}@127.0.0.1:1", TANDEM_REDIS_WAIT_S="1.5")
    assert ended.code == 1  # it may pass: a restart is worth while
    assert ended.first.startswith("waiting for Redis: Redis at redis://tandem:***@127.0.0.1:1 is unreachable")
    assert [each["message"] for each in ended.errors] == ["waiting for Redis", "service failed"]
    assert REDIS_PASSWORD not in ended.text


@pytest.mark.slow
def test_a_redis_host_that_is_none_is_named(run: Run) -> None:
    ended = run("coordinator", REDIS_URL="redis://no-such-host.invalid:6379", TANDEM_REDIS_WAIT_S="0")
    assert "Redis at redis://no-such-host.invalid:6379 is unreachable" in ended.first


@pytest.mark.slow
def test_a_wrong_password_of_redis_is_not_tried_again(run: Run, redis_process: Callable[..., Any]) -> None:
    server = redis_process(password="right-one")
    ended = run("coordinator", REDIS_URL=server.url.replace("right-one", REDIS_PASSWORD))
    assert (ended.code, len(ended.errors)) == (2, 1)
    assert "refuses the user or the password" in ended.first
    assert REDIS_PASSWORD not in ended.text


@pytest.mark.parametrize("service", EACH)
def test_an_expired_certificate_is_named_and_status_shows_it(
    run: Run, base: dict[str, str], tmp_path: Path, service: str
) -> None:
    authority = Authority("ours")
    names = [role_name(service.partition("-")[0])]
    files = write_files(tmp_path / "tls", authority.issue(names, begins=-3 * DAY, ends=-DAY), authority.pem)
    ended = run(service, **variables(files))
    reason = f"TANDEM_TLS_CERT={files.certificate}: the certificate of CN={names[0]} expired on "
    assert ended.code == 2
    assert ended.first.startswith(f"bad configuration: {reason}")
    shown = status(base)
    assert f"failed  {service} ended" in shown
    assert reason in shown


@pytest.mark.slow
def test_a_certificate_for_another_name_is_named(run: Run, tmp_path: Path) -> None:
    authority = Authority("ours")
    files = write_files(tmp_path / "tls", authority.issue(["trainer.tandem"]), authority.pem)
    ended = run("coordinator", **variables(files))
    assert ended.code == 2
    assert "CN=trainer.tandem is for trainer.tandem, not for coordinator.tandem" in ended.first


@pytest.mark.parametrize("service", EACH)
def test_a_typo_in_the_configuration_is_named_with_a_suggestion(
    run: Run, base: dict[str, str], config: dict[str, Any], service: str
) -> None:
    config["grpo"] = {"group_sise": 4}
    ended = run(service)
    assert ended.code == 2
    assert "grpo.group_sise" in ended.first
    assert "group_size" in ended.first
    assert "grpo.group_sise" in status(base)


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_a_configuration_that_is_not_there_is_named(run: Run, service: str) -> None:
    ended = run(service, "--config", "/nowhere.yaml")
    assert ended.code == 2
    assert "/nowhere.yaml" in ended.first


@pytest.mark.slow
@pytest.mark.parametrize("service", ["trainer", "rollout-0"])
def test_a_gpu_that_is_asked_for_and_not_there_is_named(run: Run, base: dict[str, str], service: str) -> None:
    ended = run(service, TANDEM_DEVICE="cuda")
    assert ended.code == 2
    assert "TANDEM_DEVICE=cuda asks for a GPU, but torch " in ended.first
    assert [failure.name for failure in Registry(base["REDIS_URL"], "t").failures()] == [service]


def test_a_service_of_another_release_is_refused_by_name(run: Run, base: dict[str, str]) -> None:
    registry = Registry(base["REDIS_URL"], "t")
    other = ServiceRecord(
        role="trainer", name="trainer", address="h:1", worker_id="w", release="tandem 9.9, protocol 9"
    )
    registry.announce(other, 60)
    ended = run("coordinator")
    registry.close()
    assert ended.code == 1  # while a run is being upgraded it may pass
    assert "coordinator is tandem 0." in ended.first
    assert "trainer at h:1, of the same run, is tandem 9.9, protocol 9" in ended.first


def test_a_service_of_another_run_or_configuration_is_refused_by_name(
    run: Run, base: dict[str, str], config: dict[str, Any], tmp_path: Path
) -> None:
    claim_run_dir(tmp_path / "run", "t")
    ended = run("coordinator", TANDEM_RUN_ID="second")
    assert ended.code == 2
    assert "is the folder of run 't' (run.json), and this is run 'second'" in ended.first
    config["sync"] = {"lease_ttl_s": 0.2}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(config | {"grpo": {"temperature": 0.7}}))
    settings = AgreedSettings(agreed_settings(load_config(tmp_path / "theirs.yaml")))
    registry = Registry(base["REDIS_URL"], "t", settings=settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        registry.announce(ServiceRecord(role="trainer", name="trainer", address=address, worker_id="w"), 60)
        ended = run("coordinator")
    registry.close()
    assert ended.code == 1  # it passes when the trainer is restarted
    told = [each.get("error", each["message"]) for each in ended.errors]
    assert "coordinator has read another configuration than trainer" in ended.first
    assert "grpo.temperature: 1.0 here, 0.7 there: restart" in ended.first
    assert told[0] in told[1:], told  # at first it waits, then it ends


@pytest.mark.parametrize(
    "service",
    ["coordinator", pytest.param("trainer", marks=pytest.mark.slow), pytest.param("rollout-0", marks=pytest.mark.slow)],
)
def test_a_volume_that_is_not_mounted_is_named(run: Run, config: dict[str, Any], tmp_path: Path, service: str) -> None:
    config["sync"] = {"transport": "disk"}  # or a rollout does not need the folder
    folder = tmp_path / "mount" / "t"
    ended = run(service, TANDEM_RUN_DIR=str(folder))
    assert ended.code == 2
    assert f"environment variable TANDEM_RUN_DIR='{folder}' is wrong" in ended.first
    assert "is its volume mounted?" in ended.first
    assert not folder.parent.exists()


@pytest.mark.slow
def test_a_trainer_in_the_folder_of_another_run_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    claim_run_dir(tmp_path / "run", "first")
    ended = run("trainer", "--resume")
    assert ended.code == 2
    assert "is the folder of run 'first' (run.json), and this is run 't'" in ended.first


def test_who_waits_for_a_failed_service_says_why_it_failed(run: Run, base: dict[str, str]) -> None:
    registry = Registry(base["REDIS_URL"], "t")
    registry.report_failure("trainer", "trainer", "RuntimeError: no GPU")
    ended = run("coordinator")
    registry.close()
    assert ended.code == 1
    assert "waited 1 s for trainer trainer" in ended.first
    assert "RuntimeError: no GPU" in ended.first
