"""Client of one rollout service: its errors name the replica, its calls always have a deadline."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from servicekit.rpc.channel import ServiceClient, open_channel
from servicekit.security.tls import Identity
from tandem_api.common.v1 import common_pb2
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_clients.flow import Order
from tandem_clients.sample_stream import SampleStream
from weightsync.round.client import of_participant
from weightsync.round.deadlines import CALL_LOAD_S

# Maximum by the service's contract (protos/tandem_api/rollout/v1/rollout.proto).
STATUS_TIMEOUT_S = 10.0
TAKE_OVER_TIMEOUT_S = 3600.0
# The longest stream; its messages renew it until then (sample_stream.py).
STREAM_TIMEOUT_S = 86_400.0


class Replica(ServiceClient):
    """One rollout service; see ServiceClient for what its methods raise.

    Attributes:
        rounds: runs the phases of a weight sync on it.
        left: whether its process has ended as it was asked to, as far as is known; why: what it has said then.
        cut: of its last stream, when it ended before what was asked for (Unix time), and how many tokens had come.
    """

    def __init__(self, name: str, address: str, identity: Identity | None = None) -> None:
        self.name = name
        self._channel = open_channel(address, identity=identity, peer="rollout")
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.rounds = of_participant(name, self._channel)
        self.left, self.why = False, ""
        self.cut: tuple[float | None, int] = (None, 0)
        self._generating = 0

    @property
    def is_generating(self) -> bool:
        """Whether a stream of ours is open."""
        return self._generating > 0

    @asynccontextmanager
    async def sampling(self, order: Order, *, timeout_s: float, newer: bool = False) -> AsyncIterator[SampleStream]:
        """Open a stream of samples for the block; at its end what still runs is cancelled.

        Args:
            timeout_s: the replica is given up if it brings no token for so long.
            newer: the policy may be newer than the order's version, and change within a completion.
        """
        call = self._stub.Generate(timeout=STREAM_TIMEOUT_S)
        self._generating += 1
        try:
            stream = SampleStream(self.name, call, order, timeout_s, newer=newer)
            await stream.begin()
            yield stream
        finally:
            self._generating -= 1
            call.cancel()

    async def take_over(self, fence: common_pb2.CoordinatorFence) -> None:
        """Make it refuse coordinators older than `fence`; return when the work that they started is done."""
        await self._call(self._stub.TakeOver, rollout_pb2.TakeOverRequest(fence=fence), TAKE_OVER_TIMEOUT_S)

    async def load_published(
        self, folder: str, *, policy_version: int, round_id: str, fence: common_pb2.CoordinatorFence
    ) -> None:
        """Seed the replica, which has no weights, from the files that round `round_id` has published."""
        request = rollout_pb2.LoadPublishedWeightsRequest(
            folder=folder, policy_version=policy_version, round_id=round_id, fence=fence
        )
        await self._call(self._stub.LoadPublishedWeights, request, CALL_LOAD_S)

    async def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> rollout_pb2.GetStatusResponse:
        """Ask for its state, version, parallel sizes and software versions."""
        request = rollout_pb2.GetStatusRequest()
        status: rollout_pb2.GetStatusResponse = await self._call(self._stub.GetStatus, request, timeout_s)
        return status
