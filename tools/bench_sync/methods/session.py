"""A rig with open channels, and rounds on it, for the measured methods."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from servicekit.rpc.limits import CHANNEL_OPTIONS
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from tools.bench_sync.processes.rig import Rig
from weightsync.membership.rendezvous import Rendezvous
from weightsync.plans.participants import Participants
from weightsync.round.client import RoundClient

CALL_S = 120.0

Seconds = dict[str, float]  # by part; "total" is the whole update, "pause" the time without generation


@dataclass
class Session:
    """A rig with open channels."""

    rig: Rig
    # Clients of the trainer's ranks, and of the replicas.
    senders: list[RoundClient] = field(default_factory=list)
    rounds: list[RoundClient] = field(default_factory=list)
    replicas: list[rollout_pb2_grpc.RolloutServiceStub] = field(default_factory=list)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.rendezvous = Rendezvous(self.rig.redis_url, self.rig.group)  # connected once, as a coordinator's

    async def everywhere(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> float:
        """Run a phase on trainer and replicas concurrently. Returns: its seconds."""
        start_s = time.perf_counter()
        await asyncio.gather(*(client.run_phase(phase, round_) for client in (*self.senders, *self.rounds)))
        return time.perf_counter() - start_s

    async def on_replicas(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> float:
        """Run a phase on the replicas only. Returns: its seconds."""
        start_s = time.perf_counter()
        await asyncio.gather(*(client.run_phase(phase, round_) for client in self.rounds))
        return time.perf_counter() - start_s

    async def checksums(self) -> list[dict[str, str]]:
        """Ask for the digests of every rollout rank's parameters."""
        request = rollout_pb2.GetChecksumsRequest()
        replies = await asyncio.gather(*(stub.GetChecksums(request, timeout=50.0) for stub in self.replicas))
        return [dict(rank.checksums) for reply in replies for rank in reply.ranks]

    async def poison(self) -> None:
        """Fill every parameter of the engines with NaN, so that one that a method leaves out is found."""
        for address in self.rig.receiver_addresses():
            async with grpc.aio.insecure_channel(address) as channel:
                stub = weights_pb2_grpc.ShardReceiverServiceStub(channel)
                await stub.PoisonWeights(pb.PoisonWeightsRequest(), timeout=CALL_S)

    def describe_round(
        self,
        install: pb.InstallMode.ValueType,
        transport: pb.SyncTransport.ValueType,
        pause: pb.PauseMode.ValueType,
    ) -> pb.Round:
        """Make a round of the trainer and all replicas."""
        case = self.rig.case
        round_ = pb.Round(
            round_id=uuid.uuid4().hex,
            policy_version=next(self.versions),
            group=self.rig.group,
            trainer=case.trainer.to_proto(),
            replicas=[
                pb.ReplicaSpec(name=f"rollout-{i}", parallel=parallel.to_proto())
                for i, parallel in enumerate(case.replicas)
            ],
            install_mode=install,
            pause_mode=pause,
            bucket_bytes=self.rig.bucket_bytes,
            formation_timeout_s=60.0,
            transfer_timeout_s=100.0,
            transport=transport,
        )
        slots = Participants.of_round(round_).slots
        round_.epoch = self.rendezvous.wait_for(slots, 60.0).epoch
        return round_


@asynccontextmanager
async def session(rig: Rig) -> AsyncIterator[Session]:
    """Open channels to a rig for the time of a `with` block."""
    addresses = rig.sender_addresses() + rig.addresses
    channels = [grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for address in addresses]
    opened = Session(rig)
    num_senders = len(rig.sender_addresses())
    clients = [
        RoundClient(address, channel, lambda *_: CALL_S) for address, channel in zip(addresses, channels, strict=True)
    ]
    opened.senders, opened.rounds = clients[:num_senders], clients[num_senders:]
    opened.replicas = [rollout_pb2_grpc.RolloutServiceStub(channel) for channel in channels[num_senders:]]
    try:
        yield opened
    finally:
        for channel in channels:
            await channel.close()
