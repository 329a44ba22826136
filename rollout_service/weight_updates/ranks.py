"""Clients of a replica's ranks: run a phase, or a load from disk, on all of them concurrently."""

from collections.abc import Sequence
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.errors import rpc_errors
from servicekit.lifecycle.tasks import all_of
from servicekit.rpc.channel import open_channel
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from weightsync.round import deadlines
from weightsync.round.client import RoundClient, RunsPhases
from weightsync.round.phases import Phase

# A ping of a rank that is frozen must end some time.
_PING_S = 600.0


class Ranks(RunsPhases, Protocol):
    """Weight receivers of a replica: one, those of a host, or all."""

    @property
    def num_ranks(self) -> int:
        """Number of the ranks."""

    async def load_published(self, request: pb.LoadPublishedRequest) -> None:
        """Fill the parameters of every rank from disk. Raises: the first rank's error, after all have answered."""

    async def checksums(self) -> list[dict[str, str]]:
        """Return the digests of each rank, by engine parameter name."""


class RankClient(RoundClient):
    """The rank behind a Unix socket. `rank` is its number among all ranks of the engine."""

    num_ranks = 1

    def __init__(self, address: str, rank: int) -> None:
        self._channel = open_channel(address)
        super().__init__(f"rank {rank}", self._channel, deadlines.rank_s)
        self._receiver = weights_pb2_grpc.ShardReceiverServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def answers(self) -> bool:
        """Whether the rank's process answers at all: that it has no such service is an answer. A frozen one waits."""
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=_PING_S)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    async def load_published(self, request: pb.LoadPublishedRequest) -> None:
        """Load published weights. Raises: TandemError."""
        with rpc_errors(self._name):
            await self._receiver.LoadPublished(request, timeout=deadlines.RANK_LOAD_S)

    async def checksums(self) -> list[dict[str, str]]:
        """Return the digests of the rank's parameters, by name."""
        with rpc_errors(self._name):
            reply = await self._receiver.GetChecksums(pb.GetChecksumsRequest(), timeout=deadlines.RANK_CHECKSUM_S)
        return [dict(reply.checksums)]

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def rank_clients(addresses: Sequence[str], first_rank: int = 0) -> list[RankClient]:
    """Make clients of one host's ranks, in order. first_rank: number of the first one among the engine's ranks."""
    return [RankClient(address, rank) for rank, address in enumerate(addresses, first_rank)]


class RankGroups:
    """Several ranks, or the ranks of several hosts, as one: every call goes to all of them concurrently."""

    def __init__(self, parts: Sequence[Ranks]) -> None:
        self._parts = list(parts)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all parts."""
        return sum(part.num_ranks for part in self._parts)

    async def run_phase(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        """Run one phase on all ranks. Returns: a report per rank. Raises: TandemError: the first error."""
        parts = await all_of(*(part.run_phase(phase, round_) for part in self._parts))
        return [report for part in parts for report in part]

    async def load_published(self, request: pb.LoadPublishedRequest) -> None:
        """Load published weights from disk on all ranks. Raises: TandemError."""
        await all_of(*(part.load_published(request) for part in self._parts))

    async def checksums(self) -> list[dict[str, str]]:
        """Return the digests of each rank's parameters, by name."""
        parts = await all_of(*(part.checksums() for part in self._parts))
        return [rank for part in parts for rank in part]
