"""Makes the page's data from a running run."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coordinator.record.health import Trouble
from coordinator.record.state import RunState
from coordinator.watch.control import RunControl
from coordinator.watch.fleet_recorder import FleetRecorder
from coordinator.web.history import History
from coordinator.web.page_data import Picture
from tandem_files.metrics_file import Baseline, Heldout
from tandem_files.pace import remaining_s

_ROUNDS_CHECKED = 5


@dataclass(frozen=True, kw_only=True)
class Source:
    """The sources of a snapshot; `troubles` returns those of the fleet, as sentences."""

    run: str
    total_iterations: int
    evaluate_every: int
    checkpoint_every: int
    limits: Mapping[str, float]
    run_dir: Path
    control: RunControl
    state: RunState
    history: History
    observed: FleetRecorder
    troubles: Callable[[], Sequence[str]]

    def snapshot(self) -> dict[str, Any]:
        """Make the page's data."""
        now_s, state, seen = time.time(), self.state, self.observed
        replicas, rounds, rows = list(seen.replicas.values()), list(seen.rounds), list(self.history.rows)
        return Picture(
            now_s=now_s,
            run=self.run,
            state=self.control.state.value,
            error=self.control.error,
            part=self.history.part,
            part_since_s=self.history.part_since_s,
            iteration=state.iteration,
            total_iterations=self.total_iterations,
            policy_version=state.policy_version,
            worked_s=state.wall_s,
            standstill_s=now_s - state.last_progress_s,
            history=self.history,
            rows=rows,
            left_s=remaining_s(
                rows, self.total_iterations, evaluate_every=self.evaluate_every, checkpoint_every=self.checkpoint_every
            ),
            heldout=Heldout.of_state(vars(state)),
            baseline=Baseline.of_state(vars(state)),
            limits=self.limits,
            disk_free=disk_free(self.run_dir),
            missed_checkpoints=list(state.missed_checkpoints),
            not_removed=list(state.not_removed),
            awaited=list(seen.awaited),
            arrived=dict(seen.arrived),
            announced=[row.name for row in replicas if row.there and not row.evaluates],
            serving=[row.name for row in replicas if row.serving],
            poisoned=[row.name for row in replicas if row.there and row.outcome == "poisoned"],
            failed_rounds=sum(sync.error != "" for sync in rounds[-_ROUNDS_CHECKED:]),
            replicas=[asdict(row) for _, row in sorted(seen.replicas.items())],
            syncs=[asdict(sync) for sync in rounds],
            timeline=self.history.timeline.plain(seen, now_s),
            messages=[
                {"time_s": event.time_s, "kind": event.kind.value, "text": event.message}
                for event in self.history.messages
            ],
            life=list(seen.life.newest),
            more_alerts=[Trouble("fleet", "", trouble) for trouble in self.troubles()],
        ).plain()


def disk_free(folder: Path) -> float:
    """Return the free share of the disk; 1 if it is unknown."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 1.0
    return usage.free / usage.total
