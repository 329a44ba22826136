"""Real service processes for tests: started as the launcher does, logs in files, ended by pid."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from servicekit.redis.registry import Registry
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig

START_S = 240.0  # engines import for 10 to 20 s on two idle cores, several times that on busy ones


@dataclass
class Services:
    """Service processes of one run."""

    redis_url: str
    folder: Path
    run_id: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def registry(self) -> Registry:
        return Registry(self.redis_url, self.run_id)

    def start_rollout(self, name: str, config: RunConfig, module: str = "rollout_service") -> None:
        """Starts a replica; its temporary files, receiver sockets included, go to `sockets_of(name)`.

        module: what runs it; another one than the service's own changes something and then runs that.
        """
        scratch = self.folder / name
        scratch.mkdir(exist_ok=True)
        self._start(name, [module, "--name", name], config, {"TMPDIR": str(scratch)})

    def start_trainer(self, config: RunConfig) -> list[str]:
        """Starts every rank. Returns: the processes' names."""
        world = config.trainer.world_size
        for rank in range(world):
            env = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            self._start(f"trainer-{rank}", ["trainer_service"], config, env)
        return [f"trainer-{rank}" for rank in range(world)]

    def sockets_of(self, replica: str) -> list[str]:
        """gRPC addresses of a replica's receivers, in rank order."""
        return [f"unix:{path}" for path in sorted((self.folder / replica).glob("**/rank*.sock"))]

    def address_of(self, role: str, name: str) -> str:
        """Waits until the service is announced. Raises: its log's end, if its process ended instead."""
        try:
            return self.registry.wait_for(role, [name], START_S)[0].address
        except Exception as error:
            raise RuntimeError(f"{name} did not come up: {error}\n{self.tail(name)}") from error

    def tail(self, name: str) -> str:
        """The end of the logs of this service's processes."""
        logs = sorted(self.folder.glob(f"{name}*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def stop(self, names: list[str]) -> list[int]:
        """SIGTERM, then the exit codes."""
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        return [self.processes.pop(name).wait(timeout=60) for name in names]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(timeout=30)

    def _start(self, name: str, module: list[str], config: RunConfig, env: dict[str, str]) -> None:
        path = self.folder / f"{name}.yaml"
        path.write_text(dump_resolved(config), encoding="utf-8")
        run_dir = self.folder / "run"
        run_dir.mkdir(exist_ok=True)
        common = {
            "REDIS_URL": self.redis_url,
            "TANDEM_RUN_ID": self.run_id,
            "TANDEM_RUN_DIR": str(run_dir),
            "TANDEM_BIND_HOST": "127.0.0.1",
            "TANDEM_TEST_HOOKS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module[0], "--config", str(path), *module[1:]],
                env={**os.environ, **common, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
