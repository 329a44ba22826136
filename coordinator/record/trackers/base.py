"""A tracker as a sink: figures of each iteration in order, caught up from metrics.jsonl, across resumes.

`<run>/trackers/<kind>.json` keeps the id that the tracker gave the run, and the last iteration that it got. So a
resumed run continues that one, and a tracker that failed for a while, or was added later, gets what it lacks.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from coordinator.record.sinks import FinishedIteration
from coordinator.record.trackers.completions import Shown
from coordinator.record.trackers.settings import Settings, without_login
from servicekit.logs import get_logger
from tandem_files.atomic import write_json_atomic
from tandem_files.metrics_file import METRICS_FILE, MetricsFile, Row

# Between attempts at a tracker that fails, so that each iteration does not wait for its timeouts again.
RETRY_S = 60.0
# The last iteration of a tracker that has nothing: the first one is 0, the evaluation before the training.
_NONE = -1
# Most characters of a library's message; the log has all of it.
_CHARACTERS = 300
ADVICE = "install it with: pip install 'tandem[trackers]'"

Outcome = Literal["finished", "interrupted", "failed"]

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a tracker shows of a run besides its figures.

    Attributes:
        name: run.name.
        settings: the configuration without secrets, by dotted key.
        outcome: returns how the run has ended.
    """

    name: str
    run_dir: Path
    settings: Settings
    outcome: Callable[[], Outcome]


class Backend(Protocol):
    """A tracker's library. Whatever a method raises is reported, and tried again later."""

    # Its name in the configuration and in messages.
    kind: str
    # Whether `open` makes it forget later figures; else those of repeated iterations would stand next to the first.
    rewinds: bool
    # Iterations that it may lose when this process is killed; they are sent again, and it ignores those that it has.
    resends: int

    def open(self, run_id: str, after: int) -> tuple[str, str]:
        """Connect; it may block, but not for ever.

        Args:
            run_id: the tracker's id of the run, from an earlier process; "" in a new run.
            after: the last iteration whose figures it has, or is to keep.
        Returns: the tracker's id of the run; a remark for the user, or "".
        """

    def log(self, iteration: int, values: dict[str, float]) -> None:
        """Send the figures of an iteration."""

    def show(self, iteration: int, completions: Sequence[Shown]) -> None:
        """Send completions of an iteration, before its figures."""

    def close(self, outcome: Outcome) -> None:
        """Send what is held back, and say how the run ended."""


class Tracker:
    """A sink that hands figures to a backend, each iteration once.

    Args:
        clock: monotonic seconds.
        completions: chooses those of an iteration that it gets as well; None: none.
    """

    def __init__(
        self,
        backend: Backend,
        facts: RunFacts,
        clock: Callable[[], float] = time.monotonic,
        completions: Callable[[FinishedIteration], list[Shown]] | None = None,
    ) -> None:
        self._completions = completions
        # Completions of the iteration to send next; an unreachable tracker gets figures later, and no completions.
        self._shown: tuple[int, list[Shown]] = (0, [])
        self._refused = ""
        self._backend, self._facts, self._clock = backend, facts, clock
        self._note = facts.run_dir / "trackers" / f"{backend.kind}.json"
        self._run_id, self._sent = _read_note(self._note, backend.resends)
        self._is_open = False
        self._newest = _NONE
        self._retry_s = 0.0
        self._failing = False

    @property
    def name(self) -> str:
        """The tracker's kind."""
        return self._backend.kind

    def take(self, finished: FinishedIteration) -> str | None:
        """Send the iteration and those before it that the tracker lacks. Returns: a warning for the user, if any."""
        iteration = int(finished.row.get("iteration") or 0)
        if self._backend.rewinds and not self._is_open:
            self._sent = min(self._sent, iteration - 1)
        self._newest = max(iteration, self._newest)
        if self._clock() < self._retry_s:
            return None
        try:
            self._shown = (iteration, [] if self._completions is None else self._completions(finished))
            remark = self._send([finished.row])
            refused, self._refused = self._refused, ""
            return remark or refused or None
        except Exception as error:  # noqa: BLE001 - the boundary of a foreign library: it must not end the sink
            return self._failed(error)

    def close(self) -> str | None:
        """Send what is missing, and say how the run ended. Returns: a warning for the user, if that fails."""
        if self._newest == _NONE:
            return None
        try:
            remark = self._send([])
            self._backend.close(self._facts.outcome())
            self._write_note(closed=True)
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("tracker not closed", tracker=self.name, error=without_login(str(error)))
            return (
                f"{self.name} has the iterations up to {max(0, self._sent)}, of {self._newest}, and not how the run "
                f"ended: {_described(error)}; metrics.jsonl has all of them"
            )
        return remark or None

    def _send(self, rows: list[Row]) -> str:
        """Open the tracker if it is not, then send what it lacks. Returns: the tracker's remark, or ""."""
        remark = ""
        if not self._is_open:
            self._run_id, remark = self._backend.open(self._run_id, self._sent)
            self._is_open = True
        for row in self._lacking(rows):
            iteration = int(row["iteration"] or 0)
            self._show(iteration)
            self._backend.log(iteration, values_of(row))
            self._sent = iteration
        self._write_note(closed=False)
        self._failing = False
        return remark

    def _show(self, iteration: int) -> None:
        """Send the completions of an iteration; where that fails, its figures are sent all the same."""
        of, shown = self._shown
        if of != iteration or not shown:
            return
        try:
            self._backend.show(iteration, shown)
        except Exception as error:  # noqa: BLE001 - the boundary of a foreign library, as in take
            log.warning("tracker takes no completions", tracker=self.name, error=without_login(str(error)))
            self._completions = None
            self._refused = f"{self.name} does not take completions: {_described(error)}; it gets the figures only"

    def _write_note(self, *, closed: bool) -> None:
        note = {"id": self._run_id, "iteration": self._sent, "closed": closed}
        self._note.parent.mkdir(exist_ok=True)
        write_json_atomic(self._note, note, durable=False)

    def _lacking(self, rows: list[Row]) -> Iterator[Row]:
        """Yield the rows that the tracker lacks; read them from disk if these are not all."""
        if [row["iteration"] for row in rows] != [self._sent + 1] and self._sent < self._newest:
            rows = MetricsFile(self._facts.run_dir / METRICS_FILE).with_baseline()
        yield from [row for row in rows if self._sent < int(row["iteration"] or 0) <= self._newest]

    def _failed(self, error: Exception) -> str | None:
        """Note a failure; the next attempt is later. Returns: a warning, if it is the first in a row."""
        log.warning("tracker failed", tracker=self.name, error=without_login(str(error)))
        self._retry_s = self._clock() + RETRY_S
        known, self._failing = self._failing, True
        if known:
            return None
        return (
            f"{self.name} does not take the figures: {_described(error)}; the run continues, and it gets what it lacks "
            f"when it works again (tried every {RETRY_S:.0f} s, and at the end)"
        )


def _described(error: Exception) -> str:
    why = without_login(f"{type(error).__name__}: {error}")[:_CHARACTERS]
    return f"{why}: {ADVICE}" if isinstance(error, ImportError) else why


def values_of(row: Row) -> dict[str, float]:
    """Return a row's figures under their names in metrics.jsonl, without what was not measured, and the iteration."""
    return {name: float(value) for name, value in row.items() if value is not None and name != "iteration"}


def _read_note(path: Path, resends: int) -> tuple[str, int]:
    """Read the tracker's id of the run, and the last iteration that it has for certain; "", _NONE in a new run."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        sent = int(note["iteration"])
        return str(note["id"]), sent if note["closed"] else max(_NONE, sent - resends)
    except (OSError, ValueError, KeyError, TypeError):
        return "", _NONE
