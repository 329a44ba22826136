"""The events of a run, as a numbered stream that watchers can join late and replay."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from servicekit.errors import InvalidRequest

# About five hundred iterations; late watchers miss older events (metrics.jsonl has every iteration).
CAPACITY = 10_000


class EventKind(Enum):
    """The kind of an event."""

    STATE = "state"
    ITERATION = "iteration"
    PROGRESS = "progress"
    EVALUATION = "evaluation"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event of the run."""

    # From 1, without gaps.
    sequence: int
    # Unix time.
    time_s: float
    kind: EventKind
    message: str
    values: Mapping[str, float] = field(default_factory=dict)


class EventLog:
    """The run's events: appended by the loop, read by any number of watchers on the same event loop."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._last = 0
        self._closed = False
        self._changed = asyncio.Event()

    def append(self, kind: EventKind, message: str, values: Mapping[str, float] | None = None) -> Event:
        """Record an event and wake the watchers."""
        self._last += 1
        event = Event(
            sequence=self._last, time_s=time.time(), kind=kind, message=message, values=dict(values) if values else {}
        )
        self._events.append(event)
        self._wake()
        return event

    def close(self) -> None:
        """End the stream: watchers end after the last event."""
        self._closed = True
        self._wake()

    def watch(self, after: int) -> AsyncIterator[Event]:
        """Yield the retained events after sequence number `after`, then new ones, until the log is closed.

        Raises: InvalidRequest: there is no event of that number yet, e.g. because the coordinator was restarted.
        """
        if after > self._last:
            raise InvalidRequest(f"after_sequence {after} is beyond the last event {self._last}: watch from 0")
        return self._follow(after)

    async def _follow(self, after: int) -> AsyncIterator[Event]:
        while True:
            # Taken before the events are read, so that an event between reading and waiting is not missed.
            changed, closed = self._changed, self._closed
            for event in self._newer(after):
                after = event.sequence
                yield event
            if after < self._last:
                continue
            if closed:
                return
            await changed.wait()

    def _newer(self, after: int) -> list[Event]:
        """Copy the newer events, because the log grows while a slow watcher reads."""
        return list(islice(reversed(self._events), self._last - after))[::-1]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
