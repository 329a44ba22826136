"""A rank that measures the lower bound, bare gloo and memcpy (`python -m`).

It moves the messages of a round between the same ranks, without packing, digests, headers or unpacking: no transport
over gloo on this host can be faster.
"""

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.bench_sync.processes.commands import serve_commands
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec
from weightsync.plans.messages import Hop, route
from weightsync.plans.round_plan import plan_round

DTYPE_BYTES = 2


class FloorRank:
    """A rank's buffers, and the measurements as commands (`do_*`)."""

    def __init__(self, hops: Sequence[Hop], rank: int) -> None:
        self._hops, self._rank = hops, rank
        # A region per message, as in the shards of a model: a reused buffer would stay in the cache.
        sizes = [hop.message.elements * DTYPE_BYTES for hop in hops]
        incoming = sum(size for hop, size in zip(hops, sizes, strict=True) if hop.receiver == rank)
        self._target = torch.ones(incoming, dtype=torch.uint8)
        self._buffers = _regions(hops, rank, self._target)

    async def run(self, command: dict[str, Any]) -> float:
        """Run a command on a thread. Returns: its seconds, measured after a barrier of all ranks."""
        return await asyncio.to_thread(getattr(self, f"do_{command['do']}"))

    def do_gloo(self) -> float:
        """Move the messages of the round over gloo."""
        dist.barrier()
        start_s = time.perf_counter()
        works, receives = [], {}
        # All transfers are started together; a message that is forwarded waits only for its own arrival.
        for hop, buffer in zip(self._hops, self._buffers, strict=True):
            if hop.receiver == self._rank:
                receives[hop.message.sequence] = dist.irecv(buffer, hop.sender, tag=hop.message.sequence)
            elif hop.hop == 0:
                works.append(dist.isend(buffer, hop.receiver, tag=hop.message.sequence))
        for hop, buffer in zip(self._hops, self._buffers, strict=True):
            if hop.sender == self._rank and hop.hop > 0:
                receives.pop(hop.message.sequence).wait()  # once: gloo takes a second wait for that of a second message
                works.append(dist.isend(buffer, hop.receiver, tag=hop.message.sequence))
        for work in [*receives.values(), *works]:
            if work is not None:
                work.wait()
        return time.perf_counter() - start_s

    def do_memcpy(self) -> float:
        """Copy as many bytes as the rank receives."""
        source = torch.ones_like(self._target)  # freed afterwards: the buffers of all ranks fill the host
        dist.barrier()
        start_s = time.perf_counter()
        self._target.copy_(source)
        return time.perf_counter() - start_s


def _regions(hops: Sequence[Hop], rank: int, target: torch.Tensor) -> list[torch.Tensor]:
    """Return the buffer of each hop: consecutive parts of `target` to receive and forward, other memory to send."""
    regions, received, begin = [], {}, 0
    for hop in hops:
        size = hop.message.elements * DTYPE_BYTES
        if hop.receiver == rank:
            regions.append(target[begin : begin + size])
            received[hop.message.sequence] = regions[-1]
            begin += size
        elif hop.hop > 0:
            regions.append(received[hop.message.sequence])
        else:
            regions.append(torch.ones(size, dtype=torch.uint8))
    return regions


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True)
    settings = json.loads(parser.parse_args().settings)
    rank, folder = int(settings["rank"]), Path(settings["folder"])
    trainer = Parallel(**settings["trainer"])
    replicas = [Parallel(**sizes) for sizes in settings["replicas"]]
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
