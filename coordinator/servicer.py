"""CoordinatorService: watches, pauses and stops the run. Translates between the wire and `RunControl`/`EventLog`."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.fleet.view import FleetView
from coordinator.record.state import RunState
from coordinator.watch.control import RunControl, State
from coordinator.watch.events import Event, EventKind, EventLog
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc

FULL_NAME = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name

_STATES = {state: pb.RunState.Value(f"RUN_STATE_{state.name}") for state in State}
_KINDS = {kind: pb.EventKind.Value(f"EVENT_KIND_{kind.name}") for kind in EventKind}


@dataclass(kw_only=True, eq=False)
class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves one run.

    Attributes:
        run: the run's name.
        total_iterations: run.iterations.
        progress: the run's state; read only here.
        fleet: read only here.
        overview: takes a snapshot of the run for `tandem top`.
    """

    run: str
    total_iterations: int
    control: RunControl
    events: EventLog
    progress: RunState
    fleet: FleetView
    overview: Callable[[], dict[str, Any]]
    _sent: tuple[dict[str, Any], pb.GetOverviewResponse] | None = field(default=None, init=False)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """Report the run's state and progress, serving replicas and troubles."""
        return pb.GetStatusResponse(
            run=self.run,
            state=_STATES[self.control.state],
            iteration=self.progress.iteration,
            total_iterations=self.total_iterations,
            policy_version=self.progress.policy_version,
            last_progress=_timestamp(self.progress.last_progress_s),
            error=self.control.error,
            serving_replicas=self.fleet.serving(),
            troubles=[*self.fleet.troubles(), *self.progress.troubles],
        )

    async def GetOverview(self, request: pb.GetOverviewRequest, context: Any) -> pb.GetOverviewResponse:
        """Send a snapshot of the run, as the web page shows it."""
        overview = self.overview()
        if self._sent is None or self._sent[0] is not overview:  # 40 ms of the loop for 170 kB
            self._sent = overview, ParseDict({"overview": overview}, pb.GetOverviewResponse())
        return self._sent[1]

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        """Stream the events after a sequence number, then new ones."""
        async for event in self.events.watch(request.after_sequence):
            yield _to_proto(event)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """Pause the run before the next iteration."""
        return pb.PauseResponse(state=_STATES[self.control.pause()])

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """Continue a paused run."""
        return pb.ResumeResponse(state=_STATES[self.control.resume()])

    async def StopAfterStep(self, request: pb.StopAfterStepRequest, context: Any) -> pb.StopAfterStepResponse:
        """End the run after the current iteration. Returns: number of iterations finished so far."""
        self.control.stop_after_step()
        return pb.StopAfterStepResponse(iteration=self.progress.iteration)


def _to_proto(event: Event) -> pb.WatchEventsResponse:
    return pb.WatchEventsResponse(
        sequence=event.sequence,
        time=_timestamp(event.time_s),
        kind=_KINDS[event.kind],
        message=event.message,
        values=event.values,
    )


def _timestamp(unix_s: float) -> Timestamp:
    message = Timestamp()
    message.FromNanoseconds(int(unix_s * 1e9))
    return message
