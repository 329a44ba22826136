"""A compose project of the repository's file, over the images of this checkout, with a job of its own."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.house.repository import REPO
from tests.images.engine import Engine, checked

RUN_DIR = "/var/lib/tandem/run"
# Engines import for 10 s on an idle machine; the deadline is for a busy one.
UP_S = 1200.0
STOP_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Project:
    """One project.

    Attributes:
        command: `docker compose` or `docker-compose`.
        name: unique on the engine.
        job: folder with arithmetic.yaml, the model and the data, that containers may read.
    """

    engine: Engine
    command: Sequence[str]
    name: str
    job: Path

    def compose(self, *arguments: str, timeout_s: float = STOP_S) -> str:
        """`docker compose ARGUMENTS`. Raises: AssertionError: it failed."""
        return checked([*self.command, "-p", self.name, *arguments], self._environ, timeout_s)

    def exit_code(self, *arguments: str) -> int:
        """The exit code of `docker compose ARGUMENTS`, whatever it is."""
        command = [*self.command, "-p", self.name, *arguments]
        return subprocess.run(command, cwd=REPO, env=self._environ, timeout=UP_S, check=False).returncode

    @property
    def _environ(self) -> dict[str, str]:
        # A port that the system chooses: 8080 may be taken here.
        return {**self.engine.environ, "TANDEM_JOB": str(self.job), "TANDEM_PAGE_PORT": "0"}

    def state(self, service: str) -> dict[str, Any]:
        """Docker's state of a service's container: Status, ExitCode, OOMKilled, Health ..."""
        container = self.compose("ps", "-a", "-q", service).strip()
        assert container, f"{service} has no container"
        found: dict[str, Any] = json.loads(self.engine.run("inspect", "--format", "{{json .State}}", container))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl, as far as it is written."""
        return [json.loads(line) for line in self.read("metrics.jsonl").splitlines()]

    def read(self, name: str) -> str:
        """A file of the results volume; "" if it is not there."""
        volume = f"{self.name}_results:{RUN_DIR}:ro"
        script = f"test ! -e {RUN_DIR}/{name} || cat {RUN_DIR}/{name}"
        image = self.engine.run("images", "--quiet", "tandem/coordinator").split()[0]
        return self.engine.run("run", "--rm", "--volume", volume, "--entrypoint", "sh", image, "-c", script)

    def remove(self) -> None:
        """Containers, network and volumes."""
        self.compose("down", "--volumes", "--remove-orphans")


def make_job(folder: Path, iterations: int) -> Path:
    """The arithmetic example with a checkpoint after each of fewer iterations, for any user to read."""
    job = folder / "job"
    shutil.copytree(REPO / "examples" / "arithmetic", job, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    set_iterations(job, iterations)
    for path in (job, *job.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return job


def set_iterations(job: Path, iterations: int) -> None:
    """Changes run.iterations of a job, and run.checkpoint_every to 1."""
    text = (REPO / "examples" / "arithmetic" / "arithmetic.yaml").read_text(encoding="utf-8")
    for key, value in (
        ("iterations: 40", f"iterations: {iterations}"),
        ("checkpoint_every: 10", "checkpoint_every: 1"),
    ):
        assert text.count(f"  {key}\n") == 1, key
        text = text.replace(f"  {key}\n", f"  {value}\n")
    (job / "arithmetic.yaml").write_text(text, encoding="utf-8")
