"""Client of one rollout service: its errors carry the replica's name, its calls always a deadline."""

from collections.abc import AsyncGenerator

from servicekit.errors import rpc_errors
from servicekit.rpc.channel import open_channel
from servicekit.security.tls import Identity
from tandem_api.common.v1 import common_pb2
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from weightsync.round.client import of_participant
from weightsync.round.deadlines import CALL_LOAD_S

# A status comes at once or the service is in trouble; its contract says 10 s.
STATUS_TIMEOUT_S = 10.0
TAKE_OVER_TIMEOUT_S = 3600.0


class Replica:
    """One rollout service. Every method raises the TandemError that the service raised, with the name in front.

    rounds: asks it for the phases of a weight sync.
    """

    def __init__(self, name: str, address: str, identity: Identity | None = None) -> None:
        self.name = name
        self._channel = open_channel(address, identity=identity, peer="rollout")
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.rounds = of_participant(name, self._channel)
        self._generating = 0

    @property
    def is_generating(self) -> bool:
        """Whether a call of ours is under way on it."""
        return self._generating > 0

    async def generate(
        self, request: rollout_pb2.GenerateGroupsRequest, *, timeout_s: float
    ) -> AsyncGenerator[rollout_pb2.GenerateGroupsResponse, None]:
        """Stream groups; close the iterator to cancel the call."""
        call = self._stub.GenerateGroups(request, timeout=timeout_s)
        self._generating += 1
        try:
            with rpc_errors(self.name):
                async for response in call:
                    yield response
        finally:
            self._generating -= 1
            call.cancel()

    async def take_over(self, fence: common_pb2.CoordinatorFence) -> None:
        """Have coordinators that are older than `fence` refused; returns when what they have begun is done."""
        with rpc_errors(self.name):
            await self._stub.TakeOver(rollout_pb2.TakeOverRequest(fence=fence), timeout=TAKE_OVER_TIMEOUT_S)

    async def load_published(
        self, folder: str, *, policy_version: int, round_id: str, fence: common_pb2.CoordinatorFence
    ) -> None:
        """Seed the replica, which has no weights, from what that round has published on disk."""
        request = rollout_pb2.LoadPublishedWeightsRequest(
            folder=folder, policy_version=policy_version, round_id=round_id, fence=fence
        )
        with rpc_errors(self.name):
            await self._stub.LoadPublishedWeights(request, timeout=CALL_LOAD_S)

    async def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> rollout_pb2.GetStatusResponse:
        """State, version, parallel sizes, software versions."""
        with rpc_errors(self.name):
            status: rollout_pb2.GetStatusResponse = await self._stub.GetStatus(
                rollout_pb2.GetStatusRequest(), timeout=timeout_s
            )
            return status

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self._channel.close()
