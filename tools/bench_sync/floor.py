"""`python -m tools.bench_sync.floor`: one rank of the floor: the round's bytes and hops over bare gloo, and memcpy.

The same messages between the same ranks in the same order, two in flight as ours, but no packing, digests, headers or
unpacking: what any transport over gloo on this host must take at least.
"""

import argparse
import asyncio
import json
import signal
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.bench_sync.commands import serve_commands
from weightsync.layout import Parallel
from weightsync.messages import Hop, route
from weightsync.model_spec import ModelSpec
from weightsync.round_plan import plan_round

WINDOW = 2
DTYPE_BYTES = 2


class FloorRank:
    """Commands by name."""

    def __init__(self, hops: Sequence[Hop], rank: int) -> None:
        self._hops, self._rank = hops, rank
        largest = max((hop.message.elements for hop in hops), default=0) * DTYPE_BYTES
        self._buffers = [torch.zeros(largest, dtype=torch.uint8) for _ in range(WINDOW)]
        incoming = sum(hop.message.elements for hop in hops if hop.receiver == rank) * DTYPE_BYTES
        self._source, self._target = (torch.zeros(incoming, dtype=torch.uint8) for _ in range(2))

    async def run(self, command: dict[str, Any]) -> float:
        """Runs the method of that name on a thread. Returns: its seconds, after a barrier of all ranks."""
        return await asyncio.to_thread(getattr(self, f"do_{command['do']}"))

    def do_gloo(self) -> float:
        dist.barrier()
        start_s = time.perf_counter()
        in_flight: deque[Any] = deque()
        for position, hop in enumerate(self._hops):
            if len(in_flight) >= WINDOW or hop.hop > 0:
                in_flight.popleft().wait() if in_flight else None
            buffer = self._buffers[position % WINDOW][: hop.message.elements * DTYPE_BYTES]
            if hop.receiver == self._rank:
                work = dist.irecv(buffer, hop.sender, tag=hop.message.sequence)
            else:
                work = dist.isend(buffer, hop.receiver, tag=hop.message.sequence)
            in_flight.append(work)
        for work in in_flight:
            work.wait()
        return time.perf_counter() - start_s

    def do_memcpy(self) -> float:
        dist.barrier()
        start_s = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - start_s


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True)
    settings = json.loads(parser.parse_args().settings)
    rank, folder = int(settings["rank"]), Path(settings["folder"])
    trainer = Parallel(**settings["trainer"])
    replicas = [Parallel(**each) for each in settings["replicas"]]
    plan = plan_round(
        ModelSpec.from_folder(settings["model"]),
        trainer,
        tuple(dict.fromkeys(replicas)),
        int(settings["bucket_bytes"]) // DTYPE_BYTES,
    )
    firsts = [trainer.world_size + sum(r.world_size for r in replicas[:i]) for i in range(len(replicas))]
    hops = route(plan.messages[replicas[0]], trainer.world_size, firsts, rank)
    world_size = trainer.world_size + sum(replica.world_size for replica in replicas)
    dist.init_process_group("gloo", f"file://{folder}/floor", rank=rank, world_size=world_size)
    floor = FloorRank(hops, rank)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    commands = await serve_commands(folder / f"floor{rank}.cmd", floor.run)
    await stop.wait()
    commands.close()


if __name__ == "__main__":
    asyncio.run(_main())
