"""Runs the real `tandem` command on the arithmetic example and looks for what it leaves behind."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem_files.metrics_file import MetricsFile
from tests.kit.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "arithmetic.yaml"
# Engines import for 20 s when the machine is idle; tests share it.
STARTED_S, ENDED_S = 150.0, 60.0
MARK = "TANDEM_TEST_MARK"
# Two iterations of the demo's task with one process per service: the smallest run that goes all the way.
SMALL = {
    "run.iterations": 2,
    "run.checkpoint_every": 1,
    "run.evaluate_every": 1,
    "grpo.prompts_per_iteration": 16,
    "grpo.group_size": 8,
    "grpo.updates_per_iteration": 2,
    "trainer.tensor_parallel": 1,
    "rollout.replicas": 1,
}


class Tandem:
    """One `tandem` process; its lines are collected while it runs."""

    def __init__(
        self, arguments: list[str], folder: Path, redis_url: str = "", environ: Mapping[str, str] = os.environ
    ) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "launcher", *arguments]
        environment = {key: value for key, value in environ.items() if key != "REDIS_URL"}
        environment |= {"REDIS_URL": redis_url} if redis_url else {}
        # Everything that the command starts carries this mark, however far it moves from its parents.
        self._mark = f"{folder}-{os.urandom(8).hex()}"
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, MARK: self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))

    def wait_line(self, wanted: Callable[[str], bool], what: str, deadline_s: float = STARTED_S) -> str:
        """The first line that is wanted. Raises: AssertionError with all output: it did not come."""
        found: list[str] = []

        def come() -> bool:
            ended = self.process.poll() is not None
            found.extend(line for line in list(self.lines) if wanted(line))
            return ended or bool(found)

        with contextlib.suppress(AssertionError):
            until(come, deadline_s, interval_s=0.05)
        assert found, f"no line with {what}; output:\n" + self.output()
        return found[0]

    def wait_iteration(self, number: int) -> None:
        """A row of this iteration is in the table, whose form depends on the width."""
        row = re.compile(rf"\s*{number}(/\d+)?\s+\d")
        self.wait_line(lambda line: row.match(line) is not None, f"iteration {number}", 240)

    def wait_up(self, name: str) -> None:
        """A service has announced itself."""
        self.wait_line(lambda line: line.strip().startswith(f"{name} is up"), f"{name} is up")

    def wait_end(self, deadline_s: float = ENDED_S) -> int:
        """The exit code, once the process has ended and all of its output is read."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s} s; output:\n" + self.output()) from None
        self._reader.join(5)
        return code

    def output(self) -> str:
        """Everything so far, with the ends of the service logs where the run failed."""
        logs = sorted(self.folder.glob("runs/*/logs/*.log"))
        tails = [f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs]
        return "\n".join([*self.lines, *tails])

    def processes(self) -> list[psutil.Process]:
        """Processes that this command, or what it has started, has started and that still run."""

        def is_ours(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.Error):  # it has ended
                return bool(process.environ().get(MARK) == self._mark)
            return False

        return [process for process in psutil.process_iter() if is_ours(process)]

    def assert_nothing_left(self) -> None:
        """Polls for twice the guards' grace period: a service that imports its engine notices SIGTERM after that."""
        with contextlib.suppress(AssertionError):
            until(lambda: not self.processes(), 60.0, interval_s=0.05)
        assert not (survivors := self.processes()), f"still running: {survivors}"


def pid_of(run: Tandem, module: str) -> int:
    """The process of a service of this run: the one whose command runs the module and that has no guard's options."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"--parent" not in command and module.encode() in command and str(run.folder).encode() in b" ".join(command):
            return int(entry.name)
    raise AssertionError(f"no process of {module}; output:\n" + run.output())


@pytest.fixture
def tandem(tmp_path: Path) -> Iterator[Callable[..., Tandem]]:
    """Starts `tandem` in the test's folder; whatever a failed test leaves is ended."""
    started: list[Tandem] = []

    def start(*arguments: str, redis_url: str = "", environ: Mapping[str, str] = os.environ) -> Tandem:
        started.append(Tandem(list(arguments), tmp_path, redis_url, environ))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait(10)
        process.assert_nothing_left()


def run_arguments(name: str = "small", **changes: Any) -> list[str]:
    """`tandem run` of the small job; keys in `changes` are written with `__` for the dot."""
    settings = {**SMALL, "run.name": name, **{key.replace("__", "."): value for key, value in changes.items()}}
    return [
        "run",
        "-c",
        str(EXAMPLE),
        *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
    ]


def summary_of(run_dir: Path) -> dict[str, Any]:
    """summary.json."""
    loaded: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return loaded


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, of iterations."""
    rows: list[dict[str, Any]] = MetricsFile(run_dir / "metrics.jsonl").rows()
    return rows
