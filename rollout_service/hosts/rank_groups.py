"""Ranks of several hosts as one: a host's ranks behind its worker, and all hosts' ranks in order."""

from collections.abc import Sequence

from rollout_service.weights.ranks import Ranks, all_of
from servicekit.errors import rpc_errors
from servicekit.rpc.channel import DeadlineChannel
from tandem_api.rollout.v1 import worker_pb2 as wpb
from tandem_api.rollout.v1 import worker_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round import deadlines
from weightsync.round.client import RoundClient


class WorkerRanks(RoundClient):
    """The ranks of one further host. `name` goes in front of their errors."""

    def __init__(self, channel: DeadlineChannel, leader_id: str, name: str, num_ranks: int) -> None:
        super().__init__(name, channel, deadlines.host_s, leader_id)
        self.num_ranks = num_ranks
        self._worker = worker_pb2_grpc.RolloutWorkerServiceStub(channel)

    async def load_published(self, request: pb.LoadPublishedRequest) -> None:
        """Load published weights from disk on all ranks. Raises: TandemError."""
        wrapped = wpb.LoadPublishedShardsRequest(leader_id=self._leader_id, published=request)
        with rpc_errors(self._name):
            await self._worker.LoadPublishedShards(wrapped, timeout=deadlines.HOST_LOAD_S)

    async def checksums(self) -> list[dict[str, str]]:
        """Digest of every parameter, by its name, for each rank."""
        request = wpb.GetRankChecksumsRequest(leader_id=self._leader_id)
        with rpc_errors(self._name):
            reply = await self._worker.GetRankChecksums(request, timeout=deadlines.HOST_CHECKSUM_S)
        return [dict(rank.checksums) for rank in reply.ranks]


class RankGroups:
    """All ranks of an engine: those of each host, in the order of the hosts."""

    def __init__(self, hosts: Sequence[Ranks]) -> None:
        self._hosts = list(hosts)

    @property
    def num_ranks(self) -> int:
        """Ranks of all hosts together."""
        return sum(host.num_ranks for host in self._hosts)

    async def run_phase(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> list[pb.PhaseReport]:
        """One phase on all ranks of the host.

        Returns: a report per rank. Raises: TandemError: the first that failed.
        """
        parts = await all_of([host.run_phase(phase, round_) for host in self._hosts])
        return [report for part in parts for report in part]

    async def load_published(self, request: pb.LoadPublishedRequest) -> None:
        """Load published weights from disk on all ranks. Raises: TandemError."""
        await all_of([host.load_published(request) for host in self._hosts])

    async def checksums(self) -> list[dict[str, str]]:
        """Digest of every parameter, by its name, for each rank."""
        parts = await all_of([host.checksums() for host in self._hosts])
        return [rank for part in parts for rank in part]
