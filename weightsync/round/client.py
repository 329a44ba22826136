"""The interface of a round's participants (trainer, replica, further host of it, rank), and the client of one."""

from collections.abc import Callable
from typing import Any, Protocol

from servicekit.errors import rpc_errors
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from weightsync.round import deadlines
from weightsync.round.phases import Phase

SERVICE = "tandem_api.weights.v1.RoundService"


class RunsPhases(Protocol):
    """A participant of rounds: one rank, or several."""

    async def run_phase(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        """Run one phase. Returns: a report per rank, in rank order. Raises: TandemError: the first rank's error."""


class RoundClient(RunsPhases):
    """The RoundService client of one participant.

    Args:
        name: of the participant; goes in front of its errors.
        channel: gRPC channel to it.
        deadline_s: gives a call's deadline, from deadlines.py.
        leader_id: for a further host of a replica, the leader that has joined it; else "".
    """

    def __init__(
        self, name: str, channel: Any, deadline_s: Callable[[Phase, pb.Round], float], leader_id: str = ""
    ) -> None:
        self._name, self._deadline_s, self._leader_id = name, deadline_s, leader_id
        self._stub = weights_pb2_grpc.RoundServiceStub(channel)

    async def run_phase(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        """Run one phase there. Raises: TandemError: the participant's error, with its name in front."""
        request = pb.RunPhaseRequest(phase=phase, round=round_, leader_id=self._leader_id)
        with rpc_errors(self._name):
            response = await self._stub.RunPhase(request, timeout=self._deadline_s(phase, round_))
        return list(response.reports)


def of_participant(name: str, channel: Any) -> RoundClient:
    """Make the coordinator's client of the trainer or of a replica."""
    return RoundClient(name, channel, lambda _, round_: deadlines.call_s(round_))
