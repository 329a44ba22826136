"""SGLang's own weight updates, used as slime, verl and AReaL use them; see `benchmarks/README.md`.

The trainer's side: tensor-parallel shards of a pipeline stage are gathered on the stage's first rank. It converts them
to Hugging Face tensors and broadcasts them in a group with all engine ranks: stage after stage, each in buckets.
"""

import asyncio
import itertools
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tools.bench_sync.methods.ours import Update
from tools.bench_sync.methods.session import Seconds, Session
from tools.bench_sync.processes.commands import CommandClient
from tools.bench_sync.processes.gathering import leader_of_stage, tensors_by_owner
from tools.bench_sync.processes.rig import Rig
from weightsync.layouts.hf import hf_layout

DTYPE = "bfloat16"
DTYPE_BYTES = 2
BUCKET_BYTES = 512 * 2**20  # slime's default for its flattened buckets


def group_of(leader: int) -> str:
    """Name the update group of a pipeline stage by its first rank."""
    return f"stock-{leader}"


def leaders_of(rig: Rig) -> list[int]:
    """List the trainer ranks that broadcast: the first of each pipeline stage."""
    ranks = range(rig.case.trainer.world_size)
    return sorted({leader_of_stage(rig.case.trainer, rank) for rank in ranks})


async def join_groups(session: Session) -> None:
    """Form SGLang's update groups: one leader and every rollout rank in each."""
    rig = session.rig
    offsets = list(itertools.accumulate((replica.world_size for replica in rig.case.replicas), initial=1))
    for leader in leaders_of(rig):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"port": port, "world_size": offsets[-1], "group": group_of(leader)}
        engines = zip(rig.replicas, offsets, strict=False)
        await asyncio.gather(
            rig.senders[leader].call("join", **shared),
            *(replica.call("init_group", rank_offset=offset, **shared) for replica, offset in engines),
        )


def from_distributed(load_format: str | None) -> Update:
    """Make a method that uses update_weights_from_distributed.

    Args:
        load_format: "flattened_bucket", or None: a broadcast per tensor.
    """
    broadcast = "broadcast_each" if load_format is None else "broadcast_flat"

    async def update(session: Session) -> Seconds:
        start_s = time.perf_counter()
        rig = session.rig
        await _call_all(rig.senders, "gather", owners="stages")
        gathered_s = time.perf_counter()
        await _call_all(rig.replicas, "begin")
        for leader in leaders_of(rig):
            for bucket in buckets_of(session, leader):
                await _send(rig, leader, bucket, broadcast, load_format)
        await _call_all(rig.replicas, "end")
        end_s = time.perf_counter()
        await _call_all(rig.senders, "forget")
        return {"gather": gathered_s - start_s, "total": end_s - start_s, "pause": end_s - gathered_s}

    return update


async def _send(
    rig: Rig, leader: int, bucket: Mapping[str, tuple[int, ...]], broadcast: str, load_format: str | None
) -> None:
    names, shapes = list(bucket), [list(shape) for shape in bucket.values()]
    group = group_of(leader)
    fields = {"names": names, "shapes": shapes, "dtype": DTYPE, "group": group, "load_format": load_format}
    await asyncio.gather(
        rig.senders[leader].call(broadcast, names=names, group=group),
        *(replica.call("update", **fields) for replica in rig.replicas),
    )


def buckets_of(session: Session, leader: int) -> list[Mapping[str, tuple[int, ...]]]:
    """Cut a leader's tensors into buckets as slime does: a bucket ends before the tensor that would not fit.

    Returns: shapes by name, per bucket.
    """
    layout = hf_layout(session.rig.spec)
    shapes = dict(zip(layout.params, layout.param_shapes, strict=True))
    buckets: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name in tensors_by_owner(session.rig.spec, session.rig.case.trainer, "stages")[leader]:
        num_bytes = DTYPE_BYTES
        for length in shapes[name]:
            num_bytes *= length
        if buckets[-1] and size + num_bytes > BUCKET_BYTES:
            buckets.append({})
            size = 0
        buckets[-1][name] = shapes[name]
        size += num_bytes
    return list(buckets)


async def from_disk(session: Session) -> Seconds:
    """Update over tmpfs: every trainer rank writes its share of whole tensors, then engines load them from disk."""
    folder = Path(tempfile.mkdtemp(prefix="bench-sync-", dir="/dev/shm"))
    rig = session.rig
    try:
        start_s = time.perf_counter()
        await _call_all(rig.senders, "gather", owners="everyone")
        await _call_all(rig.senders, "write", folder=str(folder))
        written_s = time.perf_counter()
        await _call_all(rig.replicas, "disk", folder=str(folder))
        end_s = time.perf_counter()
        await _call_all(rig.replicas, "all_ranks")
        lag_s = time.perf_counter() - end_s
        await _call_all(rig.senders, "forget")
        return {
            "gather_and_write": written_s - start_s,
            "total": end_s - start_s,
            "pause": end_s - written_s,
            "lag": lag_s,
        }
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _call_all(clients: list[CommandClient], do: str, **fields: str) -> None:
    await asyncio.gather(*(client.call(do, **fields) for client in clients))
