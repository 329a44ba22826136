"""Weights & Biases, online or offline: a process of W&B's own sends; what a lost network kept back, `wandb sync` adds.

Iterations that a resume repeats keep their first figures: W&B takes no figures for earlier steps.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.record.sinks import CLOSE_TIMEOUT_S
from coordinator.record.trackers.base import Outcome, RunFacts
from coordinator.record.trackers.completions import COLUMNS, Shown
from servicekit.logs import get_logger
from tandem_config.sections.trackers import WandbTracker

if TYPE_CHECKING:
    from wandb import Run

# A run waits for none of it; offline is the way out when it is over.
INIT_TIMEOUT_S = 30.0
# Sinks have this long altogether to end.
_FINISH_TIMEOUT_S = CLOSE_TIMEOUT_S - 5.0

# W&B writes what it has got every 15 seconds; iterations of less than 0.3 s have not been seen.
RESENDS = 50

log = get_logger(__name__)


class WandbBackend:
    """A run of W&B."""

    kind = "wandb"
    rewinds = False
    resends = RESENDS

    def __init__(self, tracker: WandbTracker, facts: RunFacts) -> None:
        self._tracker, self._facts = tracker, facts
        self._run: Run | None = None

    def open(self, run_id: str, after: int) -> tuple[str, str]:
        """Begin or continue the run; offline, with a remark, if W&B cannot be reached."""
        # W&B's reports of its own errors are not ours to send.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        run_id = run_id or f"{self._facts.name[:50]}-{secrets.token_hex(4)}"
        try:
            self._run = self._begin(run_id, self._tracker.mode)
        except (wandb.Error, OSError) as error:
            log.warning("wandb run not begun online", error=str(error))
            # Its process keeps the id of the run that failed.
            wandb.teardown()
            self._run = self._begin(run_id, "offline")
            why, folder = " ".join(str(error).split()), Path(self._run.settings.sync_dir)
            return run_id, (
                f"wandb does not take the run ({type(error).__name__}: {why}), so it is kept on disk: upload it with "
                f"`wandb sync {folder}`"
            )
        return run_id, ""

    def log(self, iteration: int, values: dict[str, float]) -> None:
        """Hand the figures to W&B's process."""
        assert self._run is not None, "open first"
        # Else W&B would keep the figures until those of the next step come.
        self._run.log(values, step=iteration, commit=True)

    def show(self, iteration: int, completions: Sequence[Shown]) -> None:
        """Hand over a table, which the figures of the same step complete."""
        import wandb

        assert self._run is not None, "open first"
        table = wandb.Table(columns=list(COLUMNS), data=[list(astuple(one)) for one in completions])
        self._run.log({"completions": table}, step=iteration, commit=False)

    def close(self, outcome: Outcome) -> None:
        """End the run; it shows as failed unless it is finished."""
        if self._run is not None:
            self._run.finish(exit_code=0 if outcome == "finished" else 1)

    def _begin(self, run_id: str, mode: str | None) -> "Run":
        import wandb

        tracker, facts = self._tracker, self._facts
        folder = tracker.dir or facts.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            group=tracker.group,
            tags=tracker.tags or None,
            name=facts.name,
            id=run_id,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            dir=str(folder),
            config=dict(facts.settings),
            allow_val_change=True,
            settings=wandb.Settings(
                # Its copy of stdout would hold the log, whose place is the run's folder.
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=_FINISH_TIMEOUT_S,
            ),
        )
