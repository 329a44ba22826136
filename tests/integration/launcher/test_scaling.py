"""A launch that is scaled, with real Redis and tiny processes as services: who starts, who ends, what stays."""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem_files.run_folder import Scale, Wish, read_scale, write_scale
from tests.integration.launcher.processes import alive
from tests.integration.launcher.test_launch import _COUNTED, ROOT, begun
from tests.kit.folders import write_config
from tests.kit.waiting import until

pytestmark = pytest.mark.integration

SEEN_S, ENDED_S = 20.0, 30.0
# argv: configuration, run folder, {name: script} as JSON; what is not in it counts its starts and waits.
_PROGRAM = """
import json, sys
from pathlib import Path
from launcher.run.run import RunRequest, launch
from launcher.report import make_console
from launcher.view.run_view import RunView
from tandem_config.loading import load_config
from tests.integration.launcher.processes import FOREVER, spec
from tests.integration.launcher.test_launch import _COUNTED

config, folder, scripts = load_config(Path(sys.argv[1])), Path(sys.argv[2]), json.loads(sys.argv[3])

def plan(config, shared, devices):
    names = ["trainer-0", *(f"rollout-{index}" for index in range(config.rollout.replicas)), "coordinator"]
    return [spec(folder, name, scripts.get(name, _COUNTED + FOREVER), grace_s=0.5) for name in names]

view = RunView(make_console(), config.run.iterations)
outcome = launch(RunRequest(config=config, run_dir=folder, redis_url=None, resume=False, plan=plan), view)
print(outcome.text)
sys.exit(outcome.code)
"""
SCRIPTS = {
    "coordinator": _COUNTED + "wait(lambda: (folder / 'end').exists())",
    "FAILS": _COUNTED + "sys.exit(3)",
    "IGNORES_SIGTERM": _COUNTED + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    signal.pause()\n",
}


class Launched:
    """A launcher process of a run that has done an iteration; `folder` is the run's."""

    def __init__(self, tmp_path: Path, scripts: dict[str, str], **sections: dict[str, Any]) -> None:
        begun(tmp_path)
        self.folder = tmp_path / "runs" / "tiny"
        command = [sys.executable, "-c", _PROGRAM, str(write_config(tmp_path, **sections)), str(self.folder)]
        asked = {"coordinator": SCRIPTS["coordinator"]} | {name: SCRIPTS[script] for name, script in scripts.items()}
        self.process = subprocess.Popen(
            [*command, json.dumps(asked)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def pids(self, name: str) -> list[int]:
        file = self.folder / f"{name}.pid"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def present(self) -> list[str]:
        """The replicas whose latest process runs."""
        names = sorted(file.stem for file in self.folder.glob("rollout-*.pid"))
        return [name for name in names if (pids := self.pids(name)) and alive(pids[-1])]

    def scale(self, replicas: int) -> Scale:
        """Ask for so many, and wait for the launcher's answer."""
        wish = Wish(replicas=replicas, wish_id=secrets.token_hex(4))
        write_scale(self.folder, wish)
        until(lambda: self.answer(wish) is not None, SEEN_S, "the launcher's answer")
        answer = self.answer(wish)
        assert answer is not None
        return answer

    def answer(self, wish: Wish) -> Scale | None:
        scale = read_scale(self.folder)
        return scale if scale is not None and scale.wish_id == wish.wish_id else None

    def until_present(self, replicas: int) -> None:
        names = [f"rollout-{index}" for index in range(replicas)]
        until(lambda: self.present() == names, SEEN_S, f"{names}, not {self.present()}; {self.lines}")

    def end(self) -> int:
        (self.folder / "end").touch()
        return self.process.wait(ENDED_S)

    def output(self) -> str:
        return " ".join("".join(self.lines).split())


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    started: list[Launched] = []
    yield started
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()


def start(launched: list[Launched], tmp_path: Path, scripts: dict[str, str] | None = None, **rollout: int) -> Launched:
    launched.append(Launched(tmp_path, scripts or {}, rollout=rollout, run={"replica_restarts": 0}))
    launched[-1].until_present(rollout.get("replicas", 1))
    return launched[-1]


def test_replicas_start_and_the_highest_end_while_all_else_stays(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path)
    assert launcher.scale(4).replicas == 4
    launcher.until_present(4)
    assert launcher.scale(1).replicas == 1
    launcher.until_present(1)
    assert launcher.scale(2).replicas == 2
    launcher.until_present(2)
    assert launcher.end() == 0
    assert launcher.present() == []
    starts = {name: len(launcher.pids(name)) for name in ("coordinator", "trainer-0", "rollout-0", "rollout-1")}
    assert starts == {"coordinator": 1, "trainer-0": 1, "rollout-0": 1, "rollout-1": 2}
    assert "scaled from 1 to 4 replicas; starting rollout-1, rollout-2, rollout-3" in launcher.output()
    assert "scaled from 4 to 1 replicas; ending rollout-1, rollout-2, rollout-3" in launcher.output()
    scale = read_scale(launcher.folder)
    assert scale is not None
    assert (scale.replicas, scale.configured) == (2, 1)


def test_a_name_is_used_again_when_its_process_has_ended(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, {"rollout-1": "IGNORES_SIGTERM"}, replicas=2)
    launcher.scale(1)
    launcher.scale(2)
    until(lambda: len(launcher.pids("rollout-1")) == 2, SEEN_S, "the second process")
    first, second = launcher.pids("rollout-1")
    assert (alive(first), alive(second)) == (False, True)
    assert launcher.end() == 0


def test_what_starts_again_after_a_death_is_what_there_should_be(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, replicas=3)
    launcher.scale(4)
    launcher.until_present(4)
    launcher.scale(2)
    launcher.until_present(2)
    os.kill(launcher.pids("trainer-0")[-1], signal.SIGKILL)
    until(lambda: len(launcher.pids("trainer-0")) == 2, SEEN_S, "the trainer's restart")
    os.kill(launcher.pids("coordinator")[-1], signal.SIGKILL)
    until(lambda: len(launcher.pids("coordinator")) == 2, SEEN_S, "the coordinator's restart")
    launcher.until_present(2)
    starts = [len(launcher.pids(f"rollout-{index}")) for index in range(4)]
    assert starts == [1, 1, 1, 1]
    assert launcher.end() == 0


def test_a_replica_that_is_left_out_begins_anew_with_a_wish(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path)
    launcher.scale(2)
    launcher.until_present(2)
    os.kill(launcher.pids("rollout-1")[-1], signal.SIGKILL)
    until(lambda: "run.replica_restarts are used up: continuing with rollout-0" in launcher.output(), SEEN_S, "it")
    assert launcher.present() == ["rollout-0"]
    launcher.scale(2)
    launcher.until_present(2)
    assert len(launcher.pids("rollout-1")) == 2
    assert launcher.end() == 0


def test_what_is_refused_or_damaged_is_said_and_changes_nothing(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, replicas=2, min_replicas=2)
    answer = launcher.scale(1)
    assert (answer.replicas, answer.refused) == (
        2,
        "1 replicas: rollout.min_replicas = 2 is more than rollout.replicas = 1: the run could never start",
    )
    (launcher.folder / "scale.wish.json").write_text("{")
    until(lambda: "not scaled: " in launcher.output() and "scale.wish.json cannot" in launcher.output(), SEEN_S, "it")
    assert launcher.scale(3).refused == ""
    launcher.until_present(3)
    assert launcher.end() == 0


def test_a_replica_that_cannot_start_ends_neither_the_run_nor_the_others(
    tmp_path: Path, launched: list[Launched]
) -> None:
    launcher = start(launched, tmp_path, {"rollout-1": "FAILS"})
    launcher.scale(2)
    until(lambda: "continuing with rollout-0" in launcher.output(), SEEN_S, "a run without rollout-1")
    launcher.scale(1)
    launcher.scale(1)
    assert launcher.present() == ["rollout-0"]
    assert launcher.end() == 0


def test_a_stop_signal_ends_also_what_leaves(tmp_path: Path, launched: list[Launched]) -> None:
    launcher = start(launched, tmp_path, {"rollout-1": "IGNORES_SIGTERM"}, replicas=2)
    launcher.scale(1)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(ENDED_S) == 128 + signal.SIGTERM
    assert launcher.present() == []
