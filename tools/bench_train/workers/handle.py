"""The benchmark's end of its workers: all of them are open together, and compute in turns."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench_train.shapes import LAYOUTS

ROOT = Path(__file__).parents[3]
# By name: the module in `workers`, and the layout of ours.
WAYS: Mapping[str, tuple[str, str]] = {
    **{f"ours_{layout}": ("ours", layout) for layout in LAYOUTS},
    "padded": ("padded", "tp1"),
    "trl": ("trl", "tp1"),
    "floor": ("floor", "tp1"),
}
DEADLINE_S = 600.0  # of an answer: the slowest step, or the start of all processes together
END_S = 30.0


@dataclass(kw_only=True)
class Handle:
    """A way's processes: one, or ours, a rank each."""

    name: str
    log: Path
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def call(self, do: str, **fields: Any) -> list[dict[str, Any]]:
        """Run a command in all ranks. Returns: their answers. Raises: RuntimeError: one ended; the end of its log."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        return await self.answers()

    async def answers(self) -> list[dict[str, Any]]:
        """Wait for an answer of each rank."""
        async with asyncio.timeout(DEADLINE_S):
            return [await self._answer(process) for process in self.processes]

    async def _answer(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended:\n{self.log.read_text(encoding='utf-8', errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def running(
    ways: Sequence[str], shape: str, model: Path, threads: int, trl_python: Path
) -> AsyncIterator[list[Handle]]:
    """Start the workers of some ways around a `with` block.

    Args:
        threads: of a way; its ranks share them.
        trl_python: interpreter of TRL's environment.
    """
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        handles = [Handle(name=way, log=Path(folder) / f"{way}.log") for way in ways]
        try:
            for handle in handles:
                python = trl_python if handle.name == "trl" else Path(sys.executable)
                await _start(handle, python, ["--shape", shape, "--model", str(model)], threads)
            for handle in handles:
                await handle.answers()
            yield handles
        finally:
            await asyncio.gather(*(handle.close() for handle in handles))


async def _start(handle: Handle, python: Path, options: Sequence[str], threads: int) -> None:
    module, layout = WAYS[handle.name]
    ranks = LAYOUTS[layout].world_size
    of_rank = str(max(1, threads // ranks))
    options = [*options, "--threads", of_rank, "--layout", layout, "--meeting", str(handle.log.with_suffix(".meeting"))]
    environment = {**os.environ, "OMP_NUM_THREADS": of_rank, "HF_HUB_OFFLINE": "1"}
    with handle.log.open("wb") as log:
        for rank in range(ranks):
            arguments = ["-W", "ignore", "-m", f"tools.bench_train.workers.{module}", *options, "--rank", str(rank)]
            process = await asyncio.create_subprocess_exec(
                python,
                *arguments,
                cwd=ROOT,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
            handle.processes.append(process)
