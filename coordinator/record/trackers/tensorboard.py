"""TensorBoard: an event file per process in `<run>/tensorboard`, by TensorBoard's own writer, without TensorFlow.

A resumed run writes a further file, whose first event makes TensorBoard drop the iterations that are repeated.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.record.trackers.base import Outcome, RunFacts
from coordinator.record.trackers.completions import Shown, as_markdown

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FOLDER = "tensorboard"


class TensorboardBackend:
    """Writes event files."""

    kind = "tensorboard"
    rewinds = True
    resends = 0

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._writer: EventFileWriter | None = None

    def open(self, run_id: str, after: int) -> tuple[str, str]:
        """Begin a file, which replaces the figures after iteration `after`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._facts.run_dir / FOLDER))
        self._write(after + 1, session_log=SessionLog(status=SessionLog.START))
        # TensorBoard keeps the hyperparameters that it finds first.
        if not run_id:
            self._write(0, summary=hparams_pb(dict(self._facts.settings)))
        return FOLDER, ""

    def log(self, iteration: int, values: dict[str, float]) -> None:
        """Write the figures, and hand them to the system."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(iteration, summary=summary).flush()

    def show(self, iteration: int, completions: Sequence[Shown]) -> None:
        """Write them as a table of texts."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write(iteration, summary=text_pb("completions", as_markdown(completions)))

    def close(self, outcome: Outcome) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, **content: object) -> "EventFileWriter":
        from tensorboard.compat.proto.event_pb2 import Event

        assert self._writer is not None, "open first"
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
        return self._writer
