"""The service's side of its ranks: one phase, or a load from disk, on all of them at once."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from servicekit.errors import rpc_errors
from servicekit.rpc.channel import open_channel
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from weightsync.round import deadlines
from weightsync.round.client import RoundClient

T = TypeVar("T")


class Ranks(Protocol):
    """The weight receivers of a replica, or of one of its hosts."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""

    async def run_phase(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> list[pb.PhaseReport]:
        """One report per rank, in rank order. Raises: the first rank's error, after all have answered."""

    async def load_published(self, request: pb.LoadPublishedRequest) -> None:
        """Every rank fills its parameters from disk. Raises: the first rank's error, after all have answered."""

    async def checksums(self) -> list[dict[str, str]]:
        """Digests by engine parameter name, per rank."""


class RankClients:
    """Ranks behind Unix sockets. `first_rank` is the number of the first among all ranks of the engine."""

    def __init__(self, addresses: Sequence[str], first_rank: int = 0) -> None:
        self.num_ranks = len(addresses)
        self._channels = [open_channel(address) for address in addresses]
        stubs = [weights_pb2_grpc.ShardReceiverServiceStub(channel) for channel in self._channels]
        self._stubs = list(enumerate(stubs, first_rank))
        self._rounds = [
            RoundClient(f"rank {rank}", channel, deadlines.rank_s)
            for rank, channel in enumerate(self._channels, first_rank)
        ]

    async def run_phase(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> list[pb.PhaseReport]:
        """One phase on all ranks at once.

        Returns: a report per rank. Raises: TandemError: of the first rank that failed.
        """
        reports = await all_of([rank.run_phase(phase, round_) for rank in self._rounds])
        return [report for each in reports for report in each]

    async def load_published(self, request: pb.LoadPublishedRequest) -> None:
        """Load published weights on all ranks. Raises: TandemError."""
        await all_of([_named(i, s.LoadPublished(request, timeout=deadlines.RANK_LOAD_S)) for i, s in self._stubs])

    async def checksums(self) -> list[dict[str, str]]:
        """Digest of every parameter, by its name, for each rank."""
        request = pb.GetChecksumsRequest()
        calls = [_named(i, s.GetChecksums(request, timeout=deadlines.RANK_CHECKSUM_S)) for i, s in self._stubs]
        return [dict(reply.checksums) for reply in await all_of(calls)]

    async def close(self) -> None:
        """Close the channels to the ranks."""
        for channel in self._channels:
            await channel.close()


async def _named(rank: int, call: Awaitable[T]) -> T:
    with rpc_errors(f"rank {rank}"):
        return await call


async def all_of(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Waits for all of them. Returns: their results in order. Raises: the first error, after all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
