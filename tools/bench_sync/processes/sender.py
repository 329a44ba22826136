"""A trainer rank with random weights in Megatron's layout, without Megatron (`python -m`).

It serves rounds over gRPC as a rank of the trainer service does, and is the trainer's side of SGLang's own updates:
it gathers whole Hugging Face tensors, then broadcasts or writes them.
"""

import argparse
import asyncio
import json
import shutil
import signal
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rollout_service.sglang_engine.receiver import ShardReceiver, add_receiver
from servicekit.rpc.sync_server import start_sync_server
from tools.bench_sync.processes.commands import serve_commands
from tools.bench_sync.processes.gathering import Owners, gather, tensors_by_owner
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec
from weightsync.plans.round_plan import source_layout
from weightsync.transfer.session import SyncMember


def random_shards(spec: ModelSpec, parallel: Parallel, rank: int) -> dict[str, torch.Tensor]:
    """Make a rank's parameters, bfloat16; norms, which every rank has, are equal on all ranks."""
    tensors = {}
    for name, shape in source_layout(spec, parallel).parameters_of(rank).items():
        seed = zlib.crc32(name.encode()) + (0 if "norm" in name else 1 + rank)
        values = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        tensors[name] = values.sub_(0.5).bfloat16()
    return tensors


def join_update_group(port: int, world_size: int, name: str) -> dist.ProcessGroup:
    """Join, as rank 0, the group of SGLang's own weight updates, in the way in which SGLang forms it."""
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world, default_pg_timeout

    store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size))
    group, _ = _new_process_group_helper(
        world_size,
        0,
        [],
        dist.Backend("gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=default_pg_timeout,
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


class Sender:
    """A trainer rank's tensors, and its side of SGLang's own updates as commands (`do_*`)."""

    def __init__(self, model: Path, spec: ModelSpec, parallel: Parallel, rank: int) -> None:
        self._model, self._spec, self._parallel, self._rank = model, spec, parallel, rank
        self.tensors = random_shards(spec, parallel, rank)
        self._whole: dict[str, torch.Tensor] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}

    async def run(self, command: dict[str, Any]) -> Any:
        """Run a command on a thread, because gloo blocks."""
        do = command.pop("do")
        return await asyncio.to_thread(getattr(self, f"do_{do}"), **command)

    def do_gather(self, owners: Owners) -> None:
        """Gather the whole tensors that this rank owns."""
        self._whole = gather(self._spec, self._parallel, self._rank, self.tensors, owners)

    def do_forget(self) -> None:
        """Free the gathered tensors."""
        self._whole = {}

    def do_join(self, port: int, world_size: int, group: str) -> None:
        """Join an update group."""
        self._groups[group] = join_update_group(port, world_size, group)

    def do_broadcast_flat(self, names: list[str], group: str) -> None:
        """Broadcast tensors as one flat bucket."""
        flat = torch.cat([self._whole[name].flatten().view(torch.uint8) for name in names])
        dist.broadcast(flat, src=0, group=self._groups[group])

    def do_broadcast_each(self, names: list[str], group: str) -> None:
        """Broadcast tensors one by one, all started before the first wait."""
        pg = self._groups[group]
        works = [dist.broadcast(self._whole[name], src=0, group=pg, async_op=True) for name in names]
        for work in works:
            if work is not None:
                work.wait()

    def do_write(self, folder: str) -> None:
        """Write this rank's file of a Hugging Face folder; rank 0 adds config.json and the index."""
        save_file(self._whole, Path(folder) / self._file(self._rank), metadata={"format": "pt"})
        if self._rank == 0:
            shutil.copyfile(self._model / "config.json", Path(folder) / "config.json")
            owned = enumerate(tensors_by_owner(self._spec, self._parallel, "everyone"))
            files = {name: self._file(rank) for rank, names in owned for name in names}
            (Path(folder) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), "utf-8")

    def _file(self, rank: int) -> str:
        return f"model-{rank + 1:05d}-of-{self._parallel.world_size:05d}.safetensors"


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True)
    settings = json.loads(parser.parse_args().settings)
    rank, folder = int(settings["rank"]), Path(settings["folder"])
    spec = ModelSpec.from_folder(settings["model"])
    parallel = Parallel(**settings["parallel"])
    dist.init_process_group("gloo", f"file://{folder}/senders", rank=rank, world_size=parallel.world_size)
    sender = Sender(Path(settings["model"]), spec, parallel, rank)
    member = SyncMember(
        spec=spec,
        slot=f"trainer/{rank}",
        parallel=parallel,
        tensors=sender.tensors,
        redis_url=settings["redis_url"],
        group=settings["group"],
    )
    member.start()
    server = start_sync_server(
        add_receiver,
        ShardReceiver(member, lambda folder: None),
        f"unix:{folder}/trainer{rank}.sock",
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    commands = await serve_commands(folder / f"trainer{rank}.cmd", sender.run)
    await stop.wait()
    commands.close()
    server.stop(grace=0)
    member.close()


if __name__ == "__main__":
    asyncio.run(_main())
