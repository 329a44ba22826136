"""Who runs the phases of a round, and the client of one: the trainer, a replica, a further host of it, or a rank."""

from collections.abc import Callable
from typing import Any, Protocol

from servicekit.errors import rpc_errors
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from weightsync.round import deadlines
from weightsync.round.phases import Phase

SERVICE = "tandem_api.weights.v1.RoundService"


class RunsPhases(Protocol):
    """Anything with ranks that take part in rounds."""

    async def run_phase(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        """Run one phase. Returns: a report per rank, in rank order. Raises: TandemError: of the first that failed."""


class RoundClient(RunsPhases):
    """Asks one participant for the phases of a round.

    Args:
        name: goes in front of its errors.
        channel: to it.
        deadline_s: of a call, from deadlines.py.
        leader_id: to a further host of a replica: the leader that it was joined to.
    """

    def __init__(
        self, name: str, channel: Any, deadline_s: Callable[[Phase, pb.Round], float], leader_id: str = ""
    ) -> None:
        self._name, self._deadline_s, self._leader_id = name, deadline_s, leader_id
        self._stub = weights_pb2_grpc.RoundServiceStub(channel)

    async def run_phase(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        """Run one phase there. Raises: TandemError: what the participant raised, named."""
        request = pb.RunPhaseRequest(phase=phase, round=round_, leader_id=self._leader_id)
        with rpc_errors(self._name):
            response = await self._stub.RunPhase(request, timeout=self._deadline_s(phase, round_))
        return list(response.reports)


def of_participant(name: str, channel: Any) -> RoundClient:
    """The coordinator's client of the trainer or of a replica."""
    return RoundClient(name, channel, lambda _, round_: deadlines.call_s(round_))
