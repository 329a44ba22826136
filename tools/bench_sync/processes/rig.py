"""The processes of one case: Redis, trainer ranks, replicas, and the ranks of the floor."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.run.redis_server import server_spec
from servicekit.redis.registry import Registry
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig
from tools.bench_sync.processes.commands import CommandClient
from tools.bench_sync.shapes import Case
from weightsync.model.spec import ModelSpec

START_S = 300.0
POLL_S = 0.05  # processes announce themselves by a file or in Redis
RUN_ID = "bench"
RUNNING_REQUESTS = 4  # of a busy engine: on two cores more of them mean longer silences between tokens


class Rig:
    """Started processes; `close` ends them by their ids."""

    def __init__(self, model: Path, case: Case, bucket_bytes: int) -> None:
        self.model, self.case, self.bucket_bytes = model, case, bucket_bytes
        self.spec = ModelSpec.from_folder(model)
        self.folder = Path(tempfile.mkdtemp(prefix="bs"))  # short: sockets live here
        self.group = f"tandem:{RUN_ID}"
        self.senders: list[CommandClient] = []
        self.replicas: list[CommandClient] = []
        self.floor: list[CommandClient] = []
        self.addresses: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[CommandClient] = []
        self._clean_up: Path | None = None
        self._closing = asyncio.Event()

    def sender_addresses(self) -> list[str]:
        """gRPC addresses of the trainer ranks' members."""
        return [f"unix:{self.folder}/trainer{rank}.sock" for rank in range(self.case.trainer.world_size)]

    async def start(self) -> None:
        """Start all processes and wait until they answer. Raises: RuntimeError: a process ended; its log's end."""
        self._start_redis()
        for index in range(len(self.case.replicas)):
            self._start_replica(index)
        for rank in range(self.case.trainer.world_size):
            self._start("trainer", rank, "sender", {"parallel": asdict(self.case.trainer)})
        num_floor = self.case.trainer.world_size + sum(sizes.world_size for sizes in self.case.replicas)
        layouts = {"trainer": asdict(self.case.trainer), "replicas": [asdict(sizes) for sizes in self.case.replicas]}
        for rank in range(num_floor):
            self._start("floor", rank, "floor", layouts)
        self.senders = [await self._connect(f"trainer{rank}") for rank in range(self.case.trainer.world_size)]
        self.floor = [await self._connect(f"floor{rank}") for rank in range(num_floor)]
        registry = Registry(self.redis_url, RUN_ID)
        await self._until(lambda: len(registry.list("rollout")) == len(self.case.replicas))
        self.addresses = [record.address for record in sorted(registry.list("rollout"), key=lambda record: record.name)]
        await asyncio.to_thread(registry.close)
        self.replicas = [await self._connect(f"rollout-{index}") for index in range(len(self.case.replicas))]

    def post_mortem(self) -> str:
        """The end of the log of every process that has ended."""
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        logs = {name: (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace") for name in ended}
        return "\n".join(f"{name} ended:\n{log[-3000:]}" for name, log in logs.items())

    def close(self) -> None:
        """End all processes of the rig."""
        self._closing.set()
        for client in self._clients:
            client.close()
        others = [process for name, process in self._processes.items() if name != "redis"]
        for process in others:
            process.terminate()
        for process in [*others, self._processes["redis"]]:  # the others leave their slots first
            _end(process)
        for folder in (self.folder, self._clean_up):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _start_redis(self) -> None:
        redis, self.redis_url = server_spec(self.folder / "redis.log")
        with redis.log.open("wb") as log:
            self._processes["redis"] = subprocess.Popen(redis.command, stdout=log, stderr=log)
        self._clean_up = redis.remove

    def _start(self, role: str, rank: int, module: str, extra: dict[str, Any]) -> None:
        settings = {
            "rank": rank,
            "folder": str(self.folder),
            "model": str(self.model),
            "redis_url": self.redis_url,
            "group": self.group,
            "bucket_bytes": self.bucket_bytes,
            **extra,
        }
        self._spawn(f"{role}{rank}", [f"tools.bench_sync.processes.{module}", "--settings", json.dumps(settings)])

    def _start_replica(self, index: int) -> None:
        name, layout = f"rollout-{index}", self.case.replicas[index]
        config = RunConfig.model_validate(
            {
                "run": {"name": RUN_ID},
                "model": {"path": self.model, "dtype": "bfloat16"},
                "data": {"train": self.model / "unused.jsonl"},
                "rollout": {
                    "tensor_parallel": layout.tensor,
                    "max_total_tokens": 2048,
                    "max_running_requests": RUNNING_REQUESTS,
                },
            }
        )
        path = self.folder / f"{name}.yaml"
        path.write_text(dump_resolved(config), encoding="utf-8")
        commands = str(self.folder / f"{name}.cmd")
        self._spawn(
            name, ["tools.bench_sync.processes.replica", "--config", str(path), "--name", name, "--commands", commands]
        )

    def receiver_addresses(self) -> list[str]:
        """gRPC addresses of the rollout ranks' receivers."""
        folders = [self.folder / f"rollout-{index}.tmp" for index in range(len(self.case.replicas))]
        return [f"unix:{path}" for folder in folders for path in sorted(folder.glob("**/rank*.sock"))]

    def _spawn(self, name: str, module: list[str]) -> None:
        scratch = self.folder / f"{name}.tmp"
        scratch.mkdir()
        environment = {
            "TMPDIR": str(scratch),
            "REDIS_URL": self.redis_url,
            "TANDEM_RUN_ID": RUN_ID,
            "TANDEM_RUN_DIR": str(self.folder),
            "TANDEM_TEST_HOOKS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *module], env={**os.environ, **environment}, stdout=log, stderr=log
            )

    async def _connect(self, name: str) -> CommandClient:
        path = self.folder / f"{name}.cmd"
        await self._until(path.exists)
        client = await CommandClient.connect(name, path)
        self._clients.append(client)
        return client

    async def _until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while not condition():
            if any(process.poll() is not None for process in self._processes.values()):
                raise RuntimeError(self.post_mortem())
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the rig did not come up within {START_S:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), POLL_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=30)


@contextlib.asynccontextmanager
async def running(model: Path, case: Case, bucket_bytes: int) -> AsyncIterator[Rig]:
    """A rig around a `with` block."""
    rig = Rig(model, case, bucket_bytes)
    try:
        await rig.start()
        yield rig
    finally:
        await asyncio.to_thread(rig.close)
