"""A launch from start to end with real Redis and real, tiny processes in place of the services."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.run_config import NEXT_CONFIG, RESOLVED_CONFIG
from tests.integration.launcher.processes import (
    FAILS,
    FOREVER,
    HAS_GRANDCHILD,
    IGNORES_SIGTERM,
    WAITS,
    alive,
    read_pid,
)
from tests.kit.folders import write_config
from tests.kit.waiting import until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]

# What the tiny processes do, beside those of processes.py. Each start adds a line to the process's pid file.
_COUNTED = """
import os, signal, sys
from pathlib import Path
folder = Path(sys.argv[1]).parent

def starts(name):
    file = folder / f"{name}.pid"
    return len(file.read_text().splitlines()) if file.exists() else 0

def wait(condition):
    while not condition():
        pass

with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
start = starts(Path(sys.argv[1]).stem)
"""
SCRIPTS = {
    "WAITS": WAITS,
    "IGNORES_SIGTERM": IGNORES_SIGTERM,
    "FAILS": FAILS,
    "HAS_GRANDCHILD": HAS_GRANDCHILD,
    "SUCCEEDS": "pass",
    "COUNTS": _COUNTED + FOREVER,
    # A trainer or replica that fails at its first start, or at each, as soon as the coordinator runs.
    "FAILS_ONCE": _COUNTED + "if start == 1:\n    wait(lambda: starts('coordinator'))\n    sys.exit(3)\n" + FOREVER,
    # A second rank: a first one that is ended before it has counted its start would have one start in all.
    "FAILS_ONCE_AFTER_THE_FIRST": _COUNTED
    + "if start == 1:\n    wait(lambda: starts('coordinator') and starts('trainer-0'))\n    sys.exit(3)\n"
    + FOREVER,
    "FAILS_ALWAYS": _COUNTED + "if start == 1:\n    wait(lambda: starts('coordinator'))\nsys.exit(3)\n",
    # Coordinators. One that succeeds once trainer-0 has written its pid: a test can then ask what became of that one.
    "SUCCEEDS_AFTER_TRAINER": _COUNTED + "wait(lambda: starts('trainer-0'))",
    # One that succeeds when all trainers have started again.
    "SUCCEEDS_WHEN_THE_TRAINER_IS_BACK": _COUNTED
    + "trainers = lambda: [starts(file.stem) for file in folder.glob('trainer-*.pid')]\n"
    + "wait(lambda: min(trainers(), default=0) > 1)",
    "SUCCEEDS_WHEN_THE_REPLICA_IS_BACK": _COUNTED + "wait(lambda: starts('rollout-0') > 1 and starts('trainer-0'))",
    # One that is killed at its first start, once the others have had theirs, and ends well at its second.
    "KILLED_ONCE": _COUNTED
    + "wait(lambda: starts('trainer-0') and starts('rollout-0'))\n"
    + "if start == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "SAYS_THAT_THE_RUN_FAILED": _COUNTED + "print('ValueError: loss is nan', file=sys.stderr)\nsys.exit(1)\n",
    # One that ends well half a second after rollout-0 is gone.
    "SUCCEEDS_WITHOUT_THE_REPLICA": _COUNTED
    + "wait(lambda: starts('rollout-0'))\n"
    + "pid = (folder / 'rollout-0.pid').read_text().strip()\n"
    + "wait(lambda: not os.path.exists(f'/proc/{pid}'))\n"
    + "import select\nselect.select([], [], [], 0.5)\n",
    # One that leaves a checkpoint when it is asked to end.
    "SAVES_WHEN_STOPPED": "import site\nsite.main()\n"
    + "from tandem_files.checkpoints import mark_complete, step_folder\n"
    + "def save(*_):\n"
    + "    step = step_folder(folder, 7)\n"
    + "    step.mkdir(parents=True)\n    mark_complete(step)\n    sys.exit(0)\n"
    + "import signal, sys\nsignal.signal(signal.SIGTERM, save)\n"
    + _COUNTED
    + FOREVER,
}
# argv: configuration, run folder, {name: [script, grace_s]} as JSON; prints what the launcher prints.
_PROGRAM = """
import json, sys
from pathlib import Path
from launcher.run.outcome import LaunchOutcome
from launcher.run.run import RunRequest, launch
from launcher.report import make_console
from launcher.view.run_view import RunView
from tandem_config.loading import load_config
from tests.integration.launcher.processes import spec

config, folder = load_config(Path(sys.argv[1])), Path(sys.argv[2])

def plan(config, shared, devices):
    (folder / "redis_url").write_text(shared.redis_url)
    services = json.loads(sys.argv[3]).items()
    return [spec(folder, name, script, grace_s=grace_s) for name, (script, grace_s) in services]

view = RunView(make_console(), config.run.iterations)
outcome = launch(RunRequest(config=config, run_dir=folder, redis_url=None, resume=False, plan=plan), view)
print(outcome.text)
sys.exit(outcome.code)
"""


class Launched:
    """A launcher process; `folder` is the run's."""

    def __init__(self, folder: Path, *services: str, **sections: dict[str, Any]) -> None:
        self.folder = folder / "runs" / "tiny"
        self.folder.mkdir(parents=True, exist_ok=True)
        scripts = dict(service.split("=") for service in services)
        asked = {
            name: (SCRIPTS[script.removesuffix("_LONG")], 60.0 if script.endswith("_LONG") else 0.5)
            for name, script in scripts.items()
        }
        config = write_config(folder, **sections)
        command = [sys.executable, "-c", _PROGRAM, str(config), str(self.folder), json.dumps(asked)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    def end(self) -> tuple[int, str]:
        """Exit code and last line."""
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output.splitlines()[-1]

    def redis_socket(self) -> Path:
        return Path((self.folder / "redis_url").read_text().removeprefix("unix://"))


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list[Launched]]:
    started: list[Launched] = []
    yield started
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()


def start(launched: list[Launched], tmp_path: Path, *services: str, **sections: dict[str, Any]) -> Launched:
    launched.append(Launched(tmp_path, *services, **sections))
    return launched[-1]


def test_a_failing_service_ends_the_run_and_is_named_in_the_last_line(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, "trainer-0=WAITS", "rollout-0=FAILS", "coordinator=IGNORES_SIGTERM")
    code, last = launcher.end()
    assert code == 1
    assert last.startswith("failed: rollout-0 exited with code 3: ValueError: out of cheese; log: ")
    assert last.endswith("logs/rollout-0.log; there is no checkpoint to resume from yet")
    assert not launcher.redis_socket().parent.exists()


def starts(launcher: Launched, name: str) -> int:
    return len((launcher.folder / f"{name}.pid").read_text().splitlines())


def begun(folder: Path) -> None:
    """The run has done an iteration."""
    run_dir = folder / "runs" / "tiny"
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n')


def checkpoint(folder: Path, iteration: int) -> None:
    begun(folder)
    step = step_folder(folder / "runs" / "tiny", iteration)
    step.mkdir(parents=True)
    mark_complete(step, iteration=iteration, policy_version=iteration, model="m", model_fingerprint="f")


def test_a_trainer_that_dies_goes_on_from_its_checkpoint_and_all_others_stay(
    tmp_path: Path, launched: list[Launched]
) -> None:
    checkpoint(tmp_path, 7)
    services = [
        "trainer-0=COUNTS",
        "trainer-1=FAILS_ONCE_AFTER_THE_FIRST",
        "rollout-0=COUNTS",
        "coordinator=SUCCEEDS_WHEN_THE_TRAINER_IS_BACK",
    ]
    launcher = start(launched, tmp_path, *services)
    output, _ = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 0, output
    assert "resumes from the checkpoint of iteration 7 (restart 1 of 2" in output.replace("\n", " ")
    assert {name: starts(launcher, name) for name in ("trainer-0", "trainer-1", "rollout-0", "coordinator")} == {
        "trainer-0": 2,
        "trainer-1": 2,
        "rollout-0": 1,
        "coordinator": 1,
    }


def test_a_trainer_that_dies_again_and_again_ends_the_run(tmp_path: Path, launched: list[Launched]) -> None:
    checkpoint(tmp_path, 7)
    launcher = start(launched, tmp_path, "trainer-0=FAILS_ALWAYS", "coordinator=COUNTS")
    code, last = launcher.end()
    assert code == 1
    assert last.startswith("failed: trainer-0 exited with code 3")
    assert last.endswith("tandem run --resume " + str(launcher.folder))
    assert starts(launcher, "trainer-0") == 3


def test_a_replica_that_dies_starts_again_alone(tmp_path: Path, launched: list[Launched]) -> None:
    begun(tmp_path)
    services = ["trainer-0=COUNTS", "rollout-0=FAILS_ONCE", "coordinator=SUCCEEDS_WHEN_THE_REPLICA_IS_BACK"]
    launcher = start(launched, tmp_path, *services)
    output, _ = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 0, output
    assert "rollout-0 exited with code 3; it starts again and is seeded (restart 1 of 4" in output.replace("\n", " ")
    assert [starts(launcher, name) for name in ("trainer-0", "rollout-0", "coordinator")] == [1, 2, 1]


def test_a_coordinator_that_is_killed_starts_again_alone(tmp_path: Path, launched: list[Launched]) -> None:
    begun(tmp_path)
    launcher = start(launched, tmp_path, "trainer-0=COUNTS", "rollout-0=COUNTS", "coordinator=KILLED_ONCE")
    output, _ = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 0, output
    where = "continues where it was, or from the initial model, for lack of a checkpoint"
    expected = f"coordinator was ended by SIGKILL; it takes over the services and {where}"
    assert expected in output.replace("\n", " ")
    assert [starts(launcher, name) for name in ("trainer-0", "rollout-0", "coordinator")] == [1, 1, 2]


def test_a_replica_that_dies_too_often_is_left_out(tmp_path: Path, launched: list[Launched]) -> None:
    begun(tmp_path)
    services = ["rollout-0=FAILS_ONCE", "rollout-1=COUNTS", "coordinator=SUCCEEDS_WITHOUT_THE_REPLICA"]
    launcher = start(launched, tmp_path, *services, run={"replica_restarts": 0})
    output, _ = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 0, output
    assert "run.replica_restarts are used up: continuing with rollout-1" in output.replace("\n", " ")


@pytest.mark.parametrize("service", ["rollout-0", "trainer-0"])
def test_before_the_first_iteration_nobody_starts_again(tmp_path: Path, launched: list[Launched], service: str) -> None:
    launcher = start(launched, tmp_path, f"{service}=FAILS", "coordinator=COUNTS")
    assert launcher.end()[1].startswith(f"failed: {service} exited with code 3: ValueError: out of cheese; log: ")


def test_a_coordinator_that_says_that_the_run_failed_is_believed(tmp_path: Path, launched: list[Launched]) -> None:
    checkpoint(tmp_path, 7)
    launcher = start(launched, tmp_path, "trainer-0=COUNTS", "coordinator=SAYS_THAT_THE_RUN_FAILED")
    code, last = launcher.end()
    assert code == 1
    assert last.startswith("failed: coordinator exited with code 1: ValueError: loss is nan")
    assert starts(launcher, "coordinator") == 1


def test_the_coordinator_s_failure_is_blamed_on_the_service_that_ended(
    tmp_path: Path, launched: list[Launched]
) -> None:
    launcher = start(launched, tmp_path, "coordinator=FAILS", "trainer-0=FAILS")
    assert launcher.end()[1].startswith("failed: trainer-0 exited with code 3")


def test_the_coordinator_s_own_failure_is_its_own(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, "coordinator=FAILS", "trainer-0=WAITS")
    assert launcher.end()[1].startswith("failed: coordinator exited with code 3: ValueError: out of cheese")


def test_a_service_that_ends_early_without_an_error_is_a_failure_too(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, "trainer-0=SUCCEEDS", "coordinator=WAITS")
    code, last = launcher.end()
    assert code == 1
    assert last.startswith("failed: trainer-0 exited with code 0 before the run was over; log: ")


def test_the_coordinator_s_success_ends_the_run(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, "trainer-0=WAITS", "coordinator=SUCCEEDS_AFTER_TRAINER")
    code, last = launcher.end()
    assert (code, last) == (0, f"finished; results are in {launcher.folder}")
    assert not alive(read_pid(launcher.folder, "trainer-0"))


@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")], ids=["INT", "TERM"]
)
def test_a_signal_ends_everything(
    tmp_path: Path, launched: list[Launched], number: signal.Signals, code: int, name: str
) -> None:
    launcher = start(launched, tmp_path, "trainer-0=HAS_GRANDCHILD", "coordinator=IGNORES_SIGTERM")
    pids = [read_pid(launcher.folder, service) for service in ("trainer-0", "coordinator")]
    launcher.process.send_signal(number)
    expected = f"stopped by {name} before its first iteration ended; there is no checkpoint to resume from yet"
    assert launcher.end() == (code, expected)
    assert not any(alive(pid) for pid in pids)
    assert not launcher.redis_socket().parent.exists()


def test_a_service_that_had_to_be_killed_is_mentioned(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, "rollout-0=IGNORES_SIGTERM", "coordinator=WAITS")
    read_pid(launcher.folder, "rollout-0")
    launcher.process.send_signal(signal.SIGTERM)
    output, _ = launcher.process.communicate(timeout=30)
    assert "warning: rollout-0 did not end on SIGTERM and was killed" in output


def test_a_second_signal_does_not_wait_for_grace_periods(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, "coordinator=IGNORES_SIGTERM_LONG")
    pid = read_pid(launcher.folder, "coordinator")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.stdout is not None
    while "send it again to kill" not in launcher.process.stdout.readline():
        pass
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end()[0] == 130
    assert not alive(pid)


def test_a_killed_launcher_takes_redis_and_services_along(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, "trainer-0=HAS_GRANDCHILD", "coordinator=WAITS")
    pids = [read_pid(launcher.folder, service) for service in ("trainer-0", "coordinator")]
    launcher.process.kill()
    until(lambda: not any(alive(pid) for pid in pids), 20.0, "services of the killed launcher gone")
    until(lambda: not launcher.redis_socket().parent.exists(), 20.0, "Redis and its folder gone")


def test_a_resume_that_trains_nothing_is_not_tried_again_and_keeps_the_configuration(
    tmp_path: Path, launched: list[Launched]
) -> None:
    run_dir = tmp_path / "runs" / "tiny"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (run_dir / RESOLVED_CONFIG).write_text("as it was")
    (run_dir / NEXT_CONFIG).write_text("as somebody wants it")
    code, last = start(launched, tmp_path, "trainer-0=FAILS_ALWAYS", "coordinator=COUNTS").end()
    assert code == 1
    assert last.endswith("; the run's configuration is what it was before")
    assert (run_dir / RESOLVED_CONFIG).read_text() == "as it was"
    assert not (run_dir / NEXT_CONFIG).exists()
    assert len((run_dir / "trainer-0.pid").read_text().splitlines()) == 1


def test_a_stopped_run_tells_of_the_checkpoint_that_it_has_left_when_stopping(
    tmp_path: Path, launched: list[Launched]
) -> None:
    launcher = start(launched, tmp_path, "coordinator=SAVES_WHEN_STOPPED_LONG")
    read_pid(launcher.folder, "coordinator")
    launcher.process.send_signal(signal.SIGTERM)
    code, last = launcher.end()
    assert code == 143
    assert "resume from iteration 7 with: tandem run --resume" in last


def test_two_launches_do_not_meet(tmp_path: Path, launched: list[Launched]) -> None:
    first = start(launched, tmp_path / "a", "coordinator=WAITS")
    second = start(launched, tmp_path / "b", "coordinator=SUCCEEDS")
    pid = read_pid(first.folder, "coordinator")
    assert second.end()[0] == 0
    assert alive(pid)
    assert first.redis_socket() != second.redis_socket()
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 143
