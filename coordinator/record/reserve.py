"""Reserves disk space, so that a run can write its last state and log lines when the disk is full."""

from pathlib import Path

from servicekit.logs import get_logger
from tandem_files.atomic import write_bytes_atomic

RESERVE_FILE = ".reserve"
# The last state and log lines of all services; far less than a checkpoint.
RESERVE_BYTES = 1 << 20

log = get_logger(__name__)


def take_reserve(run_dir: Path) -> None:
    """Write the reserve file; a failure is only logged, since the run fails on a full disk anyway."""
    try:
        # Zeros suffice on common file systems; one that compresses would need random bytes.
        write_bytes_atomic(run_dir / RESERVE_FILE, bytes(RESERVE_BYTES))
    except OSError as error:
        log.warning("disk reserve not taken", error=str(error))


def release_reserve(run_dir: Path) -> None:
    """Remove the reserve file; call it before the last state is written."""
    try:
        (run_dir / RESERVE_FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("disk reserve not released", error=str(error))
