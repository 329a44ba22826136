"""Collects from the events what the page shows: curves, the current part of the iteration, recent messages."""

import time
from collections import deque
from collections.abc import Mapping, Sequence

from coordinator.watch.events import Event, EventKind, EventLog
from coordinator.web.timeline import Timeline
from tandem_files.metrics_file import thin_rows

_MESSAGES_KEPT = 30
# Points of a curve that are sent: more than a curve is pixels wide.
POINTS = 240

Row = Mapping[str, float]


class History:
    """Follows the events of a run; read and written on one event loop.

    Args:
        rows: iterations of earlier processes of the run.
    Attributes:
        rows: of a long run not all (thin_rows).
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows = list(rows)
        thin_rows(self.rows)
        # Names of the fields that any row has had, in their order.
        self.names = {name: None for row in rows for name in row}
        # Changes of the state, warnings, evaluations.
        self.messages: deque[Event] = deque(maxlen=_MESSAGES_KEPT)
        self.timeline = Timeline()
        self.part = ""
        self.part_since_s = time.time()
        self._curves: dict[str, list[tuple[float, float]]] = {}

    async def follow(self, events: EventLog) -> None:
        """Add events until the log is closed."""
        async for event in events.watch(0):
            self.add(event)

    def add(self, event: Event) -> None:
        """Add an event."""
        self.timeline.add(event)
        if event.kind is EventKind.ITERATION:
            while self.rows and self.rows[-1]["iteration"] >= event.values["iteration"]:
                self.rows.pop()  # repeated, from a checkpoint
            self.rows.append(event.values)
            thin_rows(self.rows)
            self.names.update(dict.fromkeys(event.values))
            self._curves.clear()
        if event.kind in (EventKind.PROGRESS, EventKind.ITERATION):
            self.part = event.message if event.kind is EventKind.PROGRESS else "report"
            self.part_since_s = event.time_s
        else:
            self.messages.append(event)

    def curve(self, field: str) -> list[tuple[float, float]]:
        """Return at most POINTS points (iteration, mean value) of a field of the rows."""
        if field not in self._curves:
            points = [(row["iteration"], row[field]) for row in self.rows if field in row]
            self._curves[field] = thin(points, POINTS)
        return self._curves[field]

    def last(self, field: str) -> float | None:
        """Return the field's value in the newest row that has one."""
        return next((row[field] for row in reversed(self.rows) if field in row), None)


def thin(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """Average at most `limit` runs of neighbouring points; a mean is at the last x of its run, so the newest x stays.

    >>> thin([(1, 10), (2, 20), (3, 30), (4, 50)], 2)
    [(2, 15.0), (4, 40.0)]
    """
    size = max(1, -(-len(points) // limit))
    # Cut from the end: only the first run may be short.
    starts = range(len(points) % size - size if len(points) % size else 0, len(points), size)
    runs = [points[max(start, 0) : start + size] for start in starts]
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]
