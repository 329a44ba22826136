"""A compose project of the repository's file, over the images of this checkout, with a job of its own."""

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.house.repository import REPO
from tests.images.engine import Engine, checked

RUN_DIR = "/var/lib/tandem/run"
# Engines import for 10 s on an idle machine; the deadline is for a busy one.
UP_S = 1200.0
# Each look starts a docker command.
LOOK_S = 1.0
STOP_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Project:
    """One project.

    Attributes:
        command: `docker compose` or `docker-compose`.
        name: unique on the engine.
        job: folder with the configuration, the model and the data, that containers may read.
        config: its name.
    """

    engine: Engine
    command: Sequence[str]
    name: str
    job: Path
    config: str = "arithmetic.yaml"

    def compose(self, *arguments: str, timeout_s: float = STOP_S) -> str:
        """`docker compose ARGUMENTS`. Raises: AssertionError: it failed."""
        return checked([*self.command, "-p", self.name, *arguments], self._environ, timeout_s)

    def exit_code(self, *arguments: str) -> int:
        """The exit code of `docker compose ARGUMENTS`, whatever it is."""
        command = [*self.command, "-p", self.name, *arguments]
        return subprocess.run(command, cwd=REPO, env=self._environ, timeout=UP_S, check=False).returncode

    @property
    def _environ(self) -> dict[str, str]:
        # Ports that the system chooses: 8080 may be taken here.
        ports = {"TANDEM_PAGE_PORT": "0", "TANDEM_PROMETHEUS_PORT": "0"}
        return {**self.engine.environ, **ports, "TANDEM_JOB": str(self.job), "TANDEM_CONFIG": self.config}

    def address(self, service: str, port: int) -> str:
        """host:port of this machine at which a service's port is published."""
        return self.compose("port", service, str(port)).strip()

    def state(self, service: str) -> dict[str, Any]:
        """Docker's state of a service's container: Status, ExitCode, OOMKilled, Health ..."""
        container = self._container(service)
        assert container, f"{service} has no container"
        found: dict[str, Any] = json.loads(self.engine.run("inspect", "--format", "{{json .State}}", container))
        return found

    def log_lines(self, service: str) -> list[dict[str, Any]]:
        """What a service has logged; lines of libraries that write past Python's logging are left out."""
        command = [self.engine.docker, "logs", self._container(service)]
        done = subprocess.run(command, env=self.engine.environ, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]

    def _container(self, service: str) -> str:
        """Id of a service's container, whether it runs or not; "" if there is none."""
        labels = {"project": self.name, "service": service}
        filters = [
            word for key, value in labels.items() for word in ("--filter", f"label=com.docker.compose.{key}={value}")
        ]
        return self.engine.run("ps", "--all", "--quiet", *filters).strip()

    def rows(self) -> list[dict[str, Any]]:
        """The iterations of metrics.jsonl, as far as it is written."""
        rows = [json.loads(line) for line in self.read("metrics.jsonl").splitlines()]
        return [row for row in rows if row["iteration"]]

    def read(self, name: str) -> str:
        """A file of the run's folder; "" if it is not there (yet)."""
        with tempfile.TemporaryDirectory() as folder:
            source = f"{self._container('coordinator')}:{RUN_DIR}/{name}"
            command = [self.engine.docker, "cp", "--follow-link", source, f"{folder}/copy"]
            done = subprocess.run(command, env=self.engine.environ, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                assert re.search("no such container|Could not find the file", done.stderr, re.IGNORECASE), done.stderr
                return ""
            return (Path(folder) / "copy").read_text(encoding="utf-8")

    def remove(self) -> None:
        """Containers, network and volumes."""
        self.compose("--profile", "cpu", "--profile", "reward", "down", "--volumes", "--remove-orphans")
