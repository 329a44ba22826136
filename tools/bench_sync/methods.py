"""Every way of bringing new weights into the engines that is measured: one function each, all in METHODS.

A method does one whole update, from the trainer's shards to engines that serve them, and says how long its parts took.
Nothing generates meanwhile, so a pause finds nothing to wait for.
"""

import asyncio
import itertools
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from servicekit.limits import CHANNEL_OPTIONS
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from tools.bench_sync.rig import Rig
from tools.bench_sync.sender import STOCK_GROUP
from weightsync.hf_layout import hf_layout
from weightsync.participants import Participants
from weightsync.rendezvous import Rendezvous

DTYPE = "bfloat16"
DTYPE_BYTES = 2
STOCK_BUCKET_BYTES = 512 * 2**20  # slime's default for its flattened buckets
CALL_S = 120.0
IN_PLACE, STAGED = pb.INSTALL_MODE_IN_PLACE, pb.INSTALL_MODE_STAGED
COLLECTIVE, COLOCATED = pb.SYNC_TRANSPORT_COLLECTIVE, pb.SYNC_TRANSPORT_COLOCATED

Seconds = dict[str, float]  # by part; "total" is the whole update, "pause" the time without generation


@dataclass
class Session:
    """A rig with open channels, and the group that SGLang's own updates use."""

    rig: Rig
    senders: list[weights_pb2_grpc.ShardReceiverServiceStub] = field(default_factory=list)
    replicas: list[rollout_pb2_grpc.RolloutServiceStub] = field(default_factory=list)
    versions: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.rendezvous = Rendezvous(self.rig.redis_url, self.rig.group)  # connected once, as a coordinator's

    async def join_stock_group(self) -> None:
        """SGLang's update group: the trainer's rank 0 and every rollout rank."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        offsets = list(itertools.accumulate((each.world_size for each in self.rig.case.replicas), initial=1))
        shared = {"port": port, "world_size": offsets[-1]}
        engines = zip(self.rig.replicas, offsets, strict=False)
        await asyncio.gather(
            self.rig.senders[0].call("join", **shared),
            *(r.call("init_group", rank_offset=offset, group=STOCK_GROUP, **shared) for r, offset in engines),
        )

    async def everywhere(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> float:
        """One phase on trainer and replicas at once. Returns: its seconds."""
        start_s = time.perf_counter()
        own = pb.RunPhaseRequest(phase=phase, round=round_)
        theirs = rollout_pb2.ReloadWeightsRequest(phase=phase, round=round_)
        await asyncio.gather(
            *(stub.RunPhase(own, timeout=CALL_S) for stub in self.senders),
            *(stub.ReloadWeights(theirs, timeout=CALL_S) for stub in self.replicas),
        )
        return time.perf_counter() - start_s

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of every rollout rank's parameters."""
        request = rollout_pb2.GetChecksumsRequest()
        replies = await asyncio.gather(*(stub.GetChecksums(request, timeout=50.0) for stub in self.replicas))
        return [dict(rank.checksums) for reply in replies for rank in reply.ranks]

    async def poison(self) -> None:
        """NaN into every parameter of the engines: what a method leaves out shows."""
        for address in self.rig.receiver_addresses():
            async with grpc.aio.insecure_channel(address) as channel:
                stub = weights_pb2_grpc.ShardReceiverServiceStub(channel)
                await stub.PoisonWeights(pb.PoisonWeightsRequest(), timeout=CALL_S)


@asynccontextmanager
async def session(rig: Rig) -> AsyncIterator[Session]:
    """Channels around a `with` block."""
    channels = [grpc.aio.insecure_channel(a, options=CHANNEL_OPTIONS) for a in rig.sender_addresses() + rig.addresses]
    opened = Session(rig)
    num_senders = len(rig.sender_addresses())
    opened.senders = [weights_pb2_grpc.ShardReceiverServiceStub(channel) for channel in channels[:num_senders]]
    opened.replicas = [rollout_pb2_grpc.RolloutServiceStub(channel) for channel in channels[num_senders:]]
    await opened.join_stock_group()
    try:
        yield opened
    finally:
        for channel in channels:
            await channel.close()


def describe_round(
    session: Session, install: pb.InstallMode.ValueType, transport: pb.SyncTransport.ValueType
) -> pb.Round:
    """A round over everybody."""
    case = session.rig.case
    round_ = pb.Round(
        round_id=uuid.uuid4().hex,
        policy_version=next(session.versions),
        group=session.rig.group,
        trainer=case.trainer.to_proto(),
        replicas=[
            pb.ReplicaSpec(name=f"rollout-{i}", parallel=parallel.to_proto())
            for i, parallel in enumerate(case.replicas)
        ],
        install_mode=install,
        pause_mode=pb.PAUSE_MODE_DRAIN,
        bucket_bytes=session.rig.bucket_bytes,
        formation_timeout_s=60.0,
        transfer_timeout_s=100.0,
        transport=transport,
    )
    slots = Participants.of_round(round_).slots
    round_.epoch = session.rendezvous.wait_for(slots, 60.0).epoch
    return round_


def ours(
    install: pb.InstallMode.ValueType, transport: pb.SyncTransport.ValueType
) -> Callable[[Session], Awaitable[Seconds]]:
    """Tandem: a whole round, as the coordinator drives it. Digests are verified in it."""

    async def update(session: Session) -> Seconds:
        start_s = time.perf_counter()
        round_ = describe_round(session, install, transport)
        seconds = {}
        phases = ["prepare", "pause", "transfer", "verify", "commit"]
        if install == STAGED:
            phases.remove("pause")  # COMMIT pauses by itself, for the flip
        for name in phases:
            part = "stop" if name == "pause" else name
            seconds[part] = await session.everywhere(pb.RoundPhase.Value(f"ROUND_PHASE_{name.upper()}"), round_)
        seconds["total"] = time.perf_counter() - start_s
        paused = ["commit"] if install == STAGED else ["stop", "transfer", "verify", "commit"]
        return seconds | {"pause": sum(seconds[part] for part in paused)}

    return update


def stock(load_format: str | None) -> Callable[[Session], Awaitable[Seconds]]:
    """SGLang's update_weights_from_distributed, fed as others feed it: whole tensors from the trainer's rank 0."""
    broadcast = "broadcast_flat" if load_format is not None else "broadcast_each"

    async def update(session: Session) -> Seconds:
        start_s = time.perf_counter()
        rig = session.rig
        await asyncio.gather(*(sender.call("gather") for sender in rig.senders))
        gathered_s = time.perf_counter()
        await asyncio.gather(*(replica.call("begin") for replica in rig.replicas))
        for bucket in stock_buckets(session):
            names, shapes = list(bucket), [list(shape) for shape in bucket.values()]
            fields = {"names": names, "shapes": shapes, "dtype": DTYPE, "group": STOCK_GROUP}
            await asyncio.gather(
                rig.senders[0].call(broadcast, names=names),
                *(replica.call("update", load_format=load_format, **fields) for replica in rig.replicas),
            )
        await asyncio.gather(*(replica.call("end") for replica in rig.replicas))
        end_s = time.perf_counter()
        await rig.senders[0].call("forget")
        return {"gather": gathered_s - start_s, "total": end_s - start_s, "pause": end_s - gathered_s}

    return update


def stock_buckets(session: Session) -> list[Mapping[str, tuple[int, ...]]]:
    """Shapes by name, cut as slime cuts them: a bucket is full when the next tensor would not fit."""
    layout = hf_layout(session.rig.spec)
    buckets: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in zip(layout.params, layout.param_shapes, strict=True):
        num_bytes = DTYPE_BYTES
        for length in shape:
            num_bytes *= length
        if buckets[-1] and size + num_bytes > STOCK_BUCKET_BYTES:
            buckets.append({})
            size = 0
        buckets[-1][name] = shape
        size += num_bytes
    return list(buckets)


async def from_disk(session: Session) -> Seconds:
    """SGLang's update_weights_from_disk over tmpfs: gather, write safetensors, load."""
    folder = Path(tempfile.mkdtemp(prefix="bench-sync-", dir="/dev/shm"))
    try:
        start_s = time.perf_counter()
        rig = session.rig
        await asyncio.gather(*(sender.call("gather") for sender in rig.senders))
        await rig.senders[0].call("write", folder=str(folder / "model"))
        written_s = time.perf_counter()
        await asyncio.gather(*(replica.call("disk", folder=str(folder / "model")) for replica in rig.replicas))
        end_s = time.perf_counter()
        await rig.senders[0].call("forget")
        return {"gather_and_write": written_s - start_s, "total": end_s - start_s, "pause": end_s - written_s}
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def floor(do: str) -> Callable[[Session], Awaitable[Seconds]]:
    """Bare gloo, or memcpy: the slowest rank's seconds after a barrier."""

    async def run(session: Session) -> Seconds:
        return {"total": max(await asyncio.gather(*(rank.call(do) for rank in session.rig.floor)))}

    return run


METHODS: dict[str, Callable[[Session], Awaitable[Seconds]]] = {
    "ours_in_place": ours(IN_PLACE, COLLECTIVE),
    "ours_staged": ours(STAGED, COLLECTIVE),
    "ours_colocated_in_place": ours(IN_PLACE, COLOCATED),
    "ours_colocated_staged": ours(STAGED, COLOCATED),
    "stock_flattened": stock("flattened_bucket"),
    "stock_per_tensor": stock(None),
    "stock_disk": from_disk,
    "floor_gloo": floor("gloo"),
    "floor_memcpy": floor("memcpy"),
}
# Measured after an untimed run of themselves: the links of a transport are made anew when the last round used another
# one, which happens in this benchmark only.
SETTLED = ("ours_in_place", "ours_colocated_in_place")
WRITING = tuple(name for name in METHODS if not name.startswith("floor"))
