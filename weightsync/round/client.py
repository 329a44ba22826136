"""The interface of a round's participants (trainer, replica, further host of it, rank), and the client of one."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from servicekit.errors import InvalidRequest, rpc_errors
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
        return await self.run_phases((phase,), round_)

    async def run_phases(self, phases: Sequence[Phase], round_: pb.Round) -> list[pb.PhaseReport]:
        """Run phases there one after the other, in one call. Returns, raises: as run_phase."""
        phase, *then = phases
        request = pb.RunPhaseRequest(phase=phase, round=round_, leader_id=self._leader_id, then=then)
        with rpc_errors(self._name):
            response = await self._stub.RunPhase(request, timeout=self._deadline_s(phase, round_))
        return list(response.reports)


async def run_in_turn(participant: RunsPhases, request: pb.RunPhaseRequest) -> list[pb.PhaseReport]:
    """Run all phases of a request. Returns: a report per rank, with the figures of all."""
    reports = await participant.run_phase(request.phase, request.round)
    for phase in request.then:
        merged = []
        for report, more in zip(reports, await participant.run_phase(phase, request.round), strict=True):
            both = pb.PhaseReport()
            both.CopyFrom(report)  # the guard keeps the reports of each phase as they are
            both.MergeFrom(more)
            merged.append(both)
        reports = merged
    return reports


def only_phase(request: pb.RunPhaseRequest) -> Phase:
    """Return the request's phase. Raises: InvalidRequest: it has more than one."""
    if request.then:
        raise InvalidRequest("then: only a replica runs several phases in one call")
    return request.phase


def of_participant(name: str, channel: Any) -> RoundClient:
    """Make the coordinator's client of the trainer or of a replica."""
    return RoundClient(name, channel, lambda _, round_: deadlines.call_s(round_))
