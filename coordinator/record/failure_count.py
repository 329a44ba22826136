"""Counts a run's failures in a row, in its folder: a Kubernetes Job counts those of its whole life.

the attempt that failed                          failures in a row
has written a checkpoint                         0: the next attempt starts further ahead
has started from where the last one did          one more
has started from another checkpoint              1
was stopped by a signal, or has finished         as before; none
"""

import json
from pathlib import Path

from servicekit.logs import get_logger
from tandem_files.atomic import write_json_atomic
from tandem_files.checkpoints import newest_iteration

FAILURES_FILE = "failures.json"
# So many failures from the same checkpoint need a person: the next attempt would fail too.
MAX_FAILURES = 7

log = get_logger(__name__)


def checkpoint_of(run_dir: Path) -> int:
    """Return the iteration that an attempt resumes from: of the newest checkpoint, 0 without one."""
    return newest_iteration(run_dir) or 0


def note_failure(run_dir: Path, began: int) -> int:
    """Count the failure of an attempt.

    Args:
        began: iteration of the checkpoint that it started from.
    Returns: failures in a row, this one included; 0: it has written a newer checkpoint.
    Raises: OSError: the count cannot be written.
    """
    newest = checkpoint_of(run_dir)
    failures = 0 if newest > began else _known(run_dir, began) + 1
    _write(run_dir, max(newest, began), failures)
    return failures


def forget_failures(run_dir: Path) -> None:
    """Begin to count anew: the run is over, or is given up, and a person decides."""
    try:
        (run_dir / FAILURES_FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("count of failures not removed", error=str(error))


def _known(run_dir: Path, began: int) -> int:
    """Return the failures in a row from this checkpoint; 0 if the file is missing or damaged."""
    try:
        noted = json.loads((run_dir / FAILURES_FILE).read_text(encoding="utf-8"))
        return int(noted["failures"]) if int(noted["iteration"]) == began else 0
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("count of failures not read, counting anew", error=str(error))
        return 0


def _write(run_dir: Path, iteration: int, failures: int) -> None:
    write_json_atomic(run_dir / FAILURES_FILE, {"iteration": iteration, "failures": failures})
