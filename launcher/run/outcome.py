"""The outcome of a launch: its exit code and its last line."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.run.supervisor import ProcessExit
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK
from tandem_files.checkpoints import newest_iteration
from tandem_files.run_folder import metrics_rows, noted_troubles, read_state

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "hang-up"}


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How a launch ended.

    Attributes:
        code: exit code: 0 finished; 1 failed; 128 + signal: stopped by it.
        text: last line for the user.
        troubles: problems of the training that the coordinator recorded.
    """

    code: int
    text: str
    troubles: tuple[str, ...] = ()


def ended(run_dir: Path) -> LaunchOutcome:
    """Describe a coordinator that ended with code 0: the run is finished, or a signal stopped the coordinator."""
    if read_state(run_dir).get("status") == "interrupted":
        return LaunchOutcome(
            code=EXIT_FAILED, text=f"failed: the coordinator was stopped by a signal; {_how_to_resume(run_dir)}"
        )
    troubles = noted_troubles(run_dir)
    but = f", but look at the training: {' '.join(troubles)} Results" if troubles else "; results"
    return LaunchOutcome(code=EXIT_OK, text=f"finished{but} are in {_shown(run_dir)}", troubles=troubles)


def failed(run_dir: Path, culprit: ProcessExit) -> LaunchOutcome:
    """Describe a process that ended before the run was over, or a coordinator that ended with an error."""
    early = " before the run was over" if culprit.code == 0 else ""
    text = f"failed: {culprit.describe()}{early}; log: {_shown(culprit.log)}; {_how_to_resume(run_dir)}"
    return LaunchOutcome(code=EXIT_FAILED, text=text + _training_troubles(run_dir))


def broken(run_dir: Path, error: Exception) -> LaunchOutcome:
    """Describe a launch whose processes could not be started."""
    return LaunchOutcome(
        code=EXIT_FAILED, text=f"failed: {error}; logs: {_shown(run_dir / 'logs')}; {_how_to_resume(run_dir)}"
    )


def stopped(run_dir: Path, number: signal.Signals, before: Mapping[str, Any]) -> LaunchOutcome:
    """Describe a run that a signal stopped, or that had failed when the signal came.

    Args:
        before: the coordinator's state when this launch began: of an earlier launch, if it has not changed since.
    """
    state = read_state(run_dir)
    if state.get("status") == "failed" and state != before:
        text = f"failed: {state.get('error', '')}; logs: {_shown(run_dir / 'logs')}; {_how_to_resume(run_dir)}"
        return LaunchOutcome(code=EXIT_FAILED, text=text + _training_troubles(run_dir))
    rows = metrics_rows(run_dir)
    progress = (
        f"after iteration {rows[-1]['iteration']:.0f}"
        if rows and "iteration" in rows[-1]
        else "before its first iteration ended"
    )
    text = f"stopped by {_NAMES.get(number, number.name)} {progress}; {_how_to_resume(run_dir)}"
    return LaunchOutcome(code=128 + number, text=text + _training_troubles(run_dir))


def _training_troubles(run_dir: Path) -> str:
    troubles = noted_troubles(run_dir)
    return f"; the training before: {' '.join(troubles)}" if troubles else ""


def _how_to_resume(run_dir: Path) -> str:
    newest = newest_iteration(run_dir)
    if newest is None:
        return "there is no checkpoint to resume from yet"
    return f"resume from iteration {newest} with: tandem run --resume {_shown(run_dir)}"


def _shown(path: Path) -> str:
    """Return the path relative to the working directory, if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
