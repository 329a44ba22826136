"""The time line of the last iterations: what the trainer did, and which version each replica had.

Events say when parts of iterations began and ended; the rest follows from what the fleet recorder keeps. All of it is
bounded, and lost when the coordinator ends: the run's folder has seconds of parts, but no times.
"""

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from coordinator.watch.events import Event, EventKind
from coordinator.watch.fleet_recorder import FleetChange, FleetRecorder, ObservedReplica, ObservedSync
from tandem_files.metrics_table import ITERATION_PARTS

# Fewer than there are rounds (ROUNDS_KEPT): some fail, or seed a replica.
_ITERATIONS = 20
# An iteration with grpo.zero_variance: replace may have 27.
_PARTS = 400
# Lanes that are sent to each viewer, every two seconds: 16 fill half a screen.
_LANES = 16


class TimedPart(NamedTuple):
    """A part of an iteration; times are Unix times here."""

    name: str
    begin_s: float
    end_s: float


class Mark(NamedTuple):
    """What happened to a replica: its outcome of a round; `left out` of one, or `evaluated`; `joined`, or `left`."""

    begin_s: float
    end_s: float
    what: str
    policy_version: int = 0


class Band(NamedTuple):
    """The time in which a replica had a version.

    Attributes:
        works: it got work: no round of a newer version has left it out.
        end_s: None: it has it still.
    """

    begin_s: float
    policy_version: int
    works: bool = True
    end_s: float | None = None


@dataclass(kw_only=True)
class ReplicaLane:
    """What became of a replica, oldest first.

    Attributes:
        there_s: when it was first seen; infinity: it is not there.
    """

    name: str
    bands: list[Band] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    there_s: float = float("inf")

    @classmethod
    def of(cls, row: ObservedReplica, seen: FleetRecorder) -> "ReplicaLane":
        """Make the lane of a replica from what was observed."""
        changes = [change for change in seen.changes if change.name == row.name]
        rounds = {sync.outcomes.get(row.name) for sync in seen.rounds}
        lane = cls(name=row.name)
        if row.policy_version is not None and "committed" not in rounds and not any(one.joined for one in changes):
            lane._has(0.0, row.policy_version)  # by a round that is not kept any more
            lane.there_s = 0.0
        happened: list[ObservedSync | FleetChange] = [*seen.rounds, *changes]
        for one in sorted(happened, key=attrgetter("time_s")):
            if isinstance(one, ObservedSync):
                lane._note_round(one)
            else:
                lane._note_change(one)
        return lane

    @property
    def now(self) -> Band | None:
        """The version that it has; None: none, or it is not there."""
        return self.bands[-1] if self.bands and self.bands[-1].end_s is None else None

    def is_in(self, begin_s: float) -> bool:
        """Whether it is there, or was from `begin_s` on."""
        return self.there_s < float("inf") or any(mark.end_s > begin_s for mark in self.marks)

    def is_odd(self, begin_s: float) -> bool:
        """Whether it has, or had from `begin_s` on, trouble of its own: a round that is given up is all replicas'."""
        marks = {mark.what for mark in self.marks if mark.end_s > begin_s}
        return self.now is None or not self.now.works or not marks <= {"committed", "aborted", "evaluated"}

    def plain(self, begin_s: float) -> dict[str, Any]:
        """Make the JSON object of what is not over at `begin_s`."""
        return {
            "name": self.name,
            "bands": [_after(begin_s, band) for band in self.bands if band.end_s is None or band.end_s > begin_s],
            "marks": [_after(begin_s, mark) for mark in self.marks if mark.end_s > begin_s],
        }

    def _has(self, at_s: float, version: int | None = None, *, works: bool = True) -> None:
        if self.now is not None:
            self.bands[-1] = self.now._replace(end_s=at_s)
        if version is not None:
            self.bands.append(Band(at_s, version, works))

    def _note_round(self, sync: ObservedSync) -> None:
        outcome, now, begin_s = sync.outcomes.get(self.name), self.now, sync.time_s - sync.round_s
        is_new = now is None or now.policy_version < sync.policy_version
        if outcome is None and (sync.error or not is_new or self.there_s > begin_s):
            return
        self.there_s = min(self.there_s, begin_s)
        evaluated = outcome is None and self.name in sync.lent
        left_out = "evaluated" if evaluated else "left out"
        self.marks.append(Mark(begin_s, sync.time_s, outcome or left_out, sync.policy_version))
        if outcome == "committed":
            self._has(sync.time_s, sync.policy_version)
        elif outcome == "poisoned":
            self._has(sync.time_s)
        elif outcome is None and not evaluated and now is not None and now.works:
            self._has(sync.time_s, now.policy_version, works=False)

    def _note_change(self, change: FleetChange) -> None:
        self.there_s = change.time_s if change.joined else float("inf")
        self.marks.append(Mark(change.time_s, change.time_s, "joined" if change.joined else "left"))
        self._has(change.time_s)


class Timeline:
    """Follows the parts of the last iterations."""

    def __init__(self) -> None:
        self._parts: deque[TimedPart] = deque(maxlen=_PARTS)
        # Number, begin and end; None: it is running.
        self._iterations: deque[tuple[int | None, float, float | None]] = deque(maxlen=_ITERATIONS)
        # Name and begin of the part that is running.
        self._now: tuple[str, float] | None = None

    def add(self, event: Event) -> None:
        """Add an event: parts begin and end by those of kind PROGRESS, and end with an iteration or a state."""
        begins = event.kind is EventKind.PROGRESS and event.message in ITERATION_PARTS
        is_other = event.kind is EventKind.PROGRESS and event.message and not begins
        if is_other or event.kind in (EventKind.WARNING, EventKind.EVALUATION):
            return
        if self._now is not None:
            self._parts.append(TimedPart(*self._now, event.time_s))
        self._now = (event.message, event.time_s) if begins else None
        running = bool(self._iterations) and self._iterations[-1][0] is None
        if begins and event.message == "generate" and not running:
            self._iterations.append((None, event.time_s, None))
        if event.kind is EventKind.ITERATION and running:
            self._parts.append(TimedPart("report", self._parts[-1].end_s, event.time_s))
            self._iterations[-1] = (int(event.values["iteration"]), self._iterations[-1][1], event.time_s)

    def plain(self, seen: FleetRecorder, now_s: float) -> dict[str, Any]:
        """Make the JSON object: seconds after its `begin_s`, a Unix time; of the start, until an iteration begins.

        Returns: {}: no part has begun.
        """
        parts = [*self._parts, *([] if self._now is None else [TimedPart(*self._now, now_s)])]
        first_s = self._iterations[0][1] if self._iterations else 0.0
        parts = [part for part in parts if part.begin_s >= first_s]
        if not parts:
            return {}
        begin_s = parts[0].begin_s
        lanes = [lane for row in seen.replicas.values() if (lane := ReplicaLane.of(row, seen)).is_in(begin_s)]
        odd_first = sorted(lanes, key=lambda lane: (not lane.is_odd(begin_s), _place(lane)))
        shown = sorted(odd_first[:_LANES], key=_place)
        return {
            "begin_s": begin_s,
            # The picture of a run that is paused or over stands still.
            "length_s": round(parts[-1].end_s - begin_s, 3),
            "parts": [_after(begin_s, part) for part in parts],
            "iterations": [_after(begin_s, iteration) for iteration in self._iterations],
            "lanes": [lane.plain(begin_s) for lane in shown],
            "not_shown": len(lanes) - len(shown),
        }


def _place(lane: ReplicaLane) -> tuple[int, str]:
    """Order rollout-2 before rollout-10."""
    return len(lane.name), lane.name


def _after(begin_s: float, values: tuple[Any, ...]) -> list[Any]:
    """Make Unix times seconds after `begin_s`: in lists these are a third as long."""
    return [round(value - begin_s, 3) if isinstance(value, float) else value for value in values]
