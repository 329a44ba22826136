"""Makes the page's data from a running run."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coordinator.record.state import RunState
from coordinator.watch.control import RunControl
from coordinator.watch.fleet_recorder import FleetRecorder
from coordinator.web.alerts import Alert, Conditions, alerts
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
        now_s = time.time()
        return Picture(
            now_s=now_s,
            run=self.run,
            state=self.control.state.value,
            error=self.control.error,
            part=self.history.part,
            part_since_s=self.history.part_since_s,
            iteration=self.state.iteration,
            total_iterations=self.total_iterations,
            policy_version=self.state.policy_version,
            worked_s=self.state.wall_s,
            history=self.history,
            left_s=remaining_s(
                list(self.history.rows),
                self.total_iterations,
                evaluate_every=self.evaluate_every,
                checkpoint_every=self.checkpoint_every,
            ),
            heldout=Heldout.of_state(vars(self.state)),
            baseline=Baseline.of_state(vars(self.state)),
            best_accuracy=self.state.best_accuracy,
            awaited=self.observed.awaited,
            arrived=self.observed.arrived,
            replicas=[asdict(row) for _, row in sorted(self.observed.replicas.items())],
            syncs=[asdict(sync) for sync in self.observed.rounds],
            alerts=[asdict(alert) for alert in self._alerts(now_s)],
            messages=[asdict(message) for message in self.history.messages],
        ).plain()

    def _alerts(self, now_s: float) -> list[Alert]:
        rows, rounds = self.observed.replicas.values(), list(self.observed.rounds)
        seen = Conditions(
            state=self.control.state.value,
            error=self.control.error,
            standstill_s=now_s - self.state.last_progress_s,
            rows=list(self.history.rows),
            limits=self.limits,
            announced=[row.name for row in rows if row.there],
            serving=[row.name for row in rows if row.serving],
            poisoned=[row.name for row in rows if row.there and row.outcome == "poisoned"],
            failed_rounds=sum(sync.error != "" for sync in rounds[-_ROUNDS_CHECKED:]),
            disk_free=disk_free(self.run_dir),
            missed_checkpoints=list(self.state.missed_checkpoints),
            not_removed=list(self.state.not_removed),
            heldout=Heldout.of_state(vars(self.state)),
        )
        return [*alerts(seen), *(Alert(name="", text=trouble) for trouble in self.troubles())]


def disk_free(folder: Path) -> float:
    """Return the free share of the disk; 1 if it is unknown."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 1.0
    return usage.free / usage.total
