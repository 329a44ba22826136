"""RolloutWorkerService: the gRPC interface of a worker."""

from typing import Any

from rollout_service.hosts.membership import WorkerMembership
from rollout_service.weight_updates.ranks import Ranks
from servicekit.errors import NotReady
from tandem_api.rollout.v1 import worker_pb2 as pb
from tandem_api.rollout.v1 import worker_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from weightsync.round.client import only_phase


class WorkerServicer(worker_pb2_grpc.RolloutWorkerServiceServicer, weights_pb2_grpc.RoundServiceServicer):
    """RolloutWorkerService and RoundService of one host; its ranks are served after serve_ranks()."""

    def __init__(self, membership: WorkerMembership, worker_id: str) -> None:
        self._membership = membership
        self._worker_id = worker_id
        self._ranks: Ranks | None = None

    def serve_ranks(self, ranks: Ranks) -> None:
        """Serve these ranks of this host."""
        self._ranks = ranks

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        """Bind this worker to a leader. Raises: Aborted: it has another one."""
        self._membership.join(request)
        return pb.JoinResponse(worker_id=self._worker_id)

    async def Beat(self, request: pb.BeatRequest, context: Any) -> pb.BeatResponse:
        """Note a beat of the leader, and report our state."""
        self._membership.beat(request.leader_id)
        return pb.BeatResponse(
            ready=self._membership.ready,
            failure=self._membership.failure,
            asked_to_stop=self._membership.asked_to_stop,
        )

    async def RunPhase(self, request: weights_pb2.RunPhaseRequest, context: Any) -> weights_pb2.RunPhaseResponse:
        """Run a phase of a round on this host's ranks."""
        ranks = self._ranks_for(request.leader_id)
        return weights_pb2.RunPhaseResponse(reports=await ranks.run_phase(only_phase(request), request.round))

    async def LoadPublishedShards(
        self, request: pb.LoadPublishedShardsRequest, context: Any
    ) -> pb.LoadPublishedShardsResponse:
        """Load published weights on this host's ranks."""
        await self._ranks_for(request.leader_id).load_published(request.published)
        return pb.LoadPublishedShardsResponse()

    async def GetRankChecksums(self, request: pb.GetRankChecksumsRequest, context: Any) -> pb.GetRankChecksumsResponse:
        """Return the digests of the parameters of this host's ranks."""
        checksums = await self._ranks_for(request.leader_id).checksums()
        return pb.GetRankChecksumsResponse(
            ranks=[weights_pb2.GetChecksumsResponse(checksums=digests) for digests in checksums]
        )

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        """End this worker with its leader."""
        self._membership.leave(request.leader_id, request.reason, failed=request.failed)
        return pb.LeaveResponse()

    def _ranks_for(self, leader_id: str) -> Ranks:
        self._membership.check(leader_id)
        if self._ranks is None:
            raise NotReady("the ranks of this host are still starting")
        return self._ranks
