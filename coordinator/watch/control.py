"""The run's state and the requests that change it.

state      pause asked           resume asked     stop asked           ends by
STARTING   PAUSED at first gate  -                ends at first gate   FAILED, INTERRUPTED
RUNNING    PAUSED at next gate   -                ends at next gate    FINISHED, FAILED, INTERRUPTED
PAUSED     -                     RUNNING          ends immediately     INTERRUPTED
FINISHED, FAILED, INTERRUPTED: final; requests change nothing
"""

import asyncio
from enum import Enum

from coordinator.watch import metrics
from coordinator.watch.events import EventKind, EventLog


class State(Enum):
    """A state of the run."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"

    @property
    def final(self) -> bool:
        """Whether no other state can follow."""
        return self in (State.FINISHED, State.FAILED, State.INTERRUPTED)


class RunControl:
    """Holds the state and appends every change to the events."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self.state = State.STARTING
        self.error = ""
        self.stop_requested = False
        self.show()

    def enter(self, state: State, why: str = "") -> None:
        """Change the state, unless it is final. why: for the event, and the error of a failed run."""
        if self.state.final or state is self.state:
            return
        self.state = state
        if state is State.FAILED:
            self.error = why
        self.show()
        self._events.append(EventKind.STATE, f"{state.value}: {why}" if why else state.value)

    def pause(self) -> State:
        """Pause the run before its next iteration. Returns: the state now (RUNNING until the iteration has ended)."""
        if not self.state.final and self._unpaused.is_set() and not self.stop_requested:
            self._unpaused.clear()
            self._events.append(EventKind.PROGRESS, "pause requested: holding before the next iteration")
        return self.state

    def resume(self) -> State:
        """Continue a paused run. Returns: the state now."""
        self._unpaused.set()
        if self.state is State.PAUSED:
            self.enter(State.RUNNING, "resumed")
        return self.state

    def stop_after_step(self) -> None:
        """End the run after the current iteration, immediately if it is paused."""
        if not self.state.final and not self.stop_requested:
            self.stop_requested = True
            self._events.append(EventKind.PROGRESS, "stop requested: ending after the current iteration")
        self.resume()

    def show(self) -> None:
        """Export the state."""
        metrics.observe_state(self.state.value, [state.value for state in State])

    async def gate(self) -> None:
        """Wait, between iterations, until the run is not paused."""
        if not self._unpaused.is_set():
            self.enter(State.PAUSED, "by request")
            await self._unpaused.wait()
        self.enter(State.RUNNING)
