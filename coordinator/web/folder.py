"""Makes the page's data from a run's folder: for a run that is over, or that another machine runs."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from coordinator.record.health import Trouble, logprob_limits
from coordinator.record.metrics_row import numeric
from coordinator.watch.life import SHOWN
from coordinator.web.history import History
from coordinator.web.page_data import Picture
from coordinator.web.snapshot import disk_free
from servicekit.errors import ConfigError
from tandem_files.ledger.life import read_life
from tandem_files.metrics_file import METRICS_FILE, Baseline, Heldout, MetricsFile
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_folder import STATE_FILE, is_locked, read_state

# A run without a launcher here that has written its state within this time is taken to run elsewhere.
_RUNS_ELSEWHERE_S = 900.0


class FolderSource:
    """Reads a run's folder; the rows again only when they have changed.

    Raises: ConfigError: it is not a run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir / RESOLVED_CONFIG).is_file():
            raise ConfigError(f"{run_dir} is not a run's folder: it has no {RESOLVED_CONFIG}")
        self._run_dir = run_dir
        self._rows: tuple[int, History] = (-1, History())

    def picture(self, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Make the page's data."""
        del query
        now_s, state = time.time(), read_state(self._run_dir)
        since = Baseline.of_state(state)
        history, settings = self._history(since), self._settings()
        status, error = self._status(state, now_s)
        return Picture(
            now_s=now_s,
            run=self._run_dir.name,
            state=status,
            error=error,
            iteration=state.get("iteration", 0),
            total_iterations=settings.get("run", {}).get("iterations", state.get("iteration", 0)),
            policy_version=state.get("policy_version", 0),
            worked_s=state.get("wall_s", 0.0),
            standstill_s=now_s - state.get("last_progress_s", now_s),
            history=history,
            rows=list(history.rows),
            heldout=Heldout.of_state(state),
            baseline=since,
            limits=_limits(settings),
            disk_free=disk_free(self._run_dir),
            life=read_life(self._run_dir, SHOWN),
            more_alerts=[Trouble("checkpoint", "", text) for text in state.get("damaged_checkpoints", [])],
        ).plain()

    def _status(self, state: Mapping[str, Any], now_s: float) -> tuple[str, str]:
        """Return the state of the run and why; a process that was killed has left `running` behind."""
        status = state.get("status", "")
        if is_locked(self._run_dir):
            return status or "starting", state.get("error", "")
        if not status:
            return "not started", f"there is no {STATE_FILE}: see the folder's logs"
        quiet_s = now_s - (self._run_dir / STATE_FILE).stat().st_mtime
        if status == "running" and quiet_s > _RUNS_ELSEWHERE_S:
            return "interrupted", f"it last wrote its state {quiet_s / 60:.0f} minutes ago, and not how it ended"
        return status, state.get("error", "")

    def _history(self, since: Baseline) -> History:
        file = self._run_dir / METRICS_FILE
        changed = file.stat().st_mtime_ns if file.is_file() else 0
        if changed != self._rows[0]:
            self._rows = (changed, History([numeric(since.comparable(row)) for row in MetricsFile(file).rows()]))
        return self._rows[1]

    def _settings(self) -> dict[str, Any]:
        """Read the configuration, of whatever release it is."""
        try:
            found = yaml.safe_load((self._run_dir / RESOLVED_CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}


def _limits(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return health.logprob_limits of a configuration of any release; none if it does not say the model's type."""
    dtypes = [settings.get(section, {}).get("dtype") for section in ("model", "sync")]
    return logprob_limits(dtypes, settings.get("grpo", {}).get("logprob_diff_limit")) if dtypes[0] else {}
