"""A piece of the disk that a run keeps, so that there is room for its last words when the disk is full."""

from pathlib import Path

from servicekit.logs import get_logger
from tandem_files.atomic import write_bytes_atomic

RESERVE_FILE = ".reserve"
# The last state and log lines of all services; far less than a checkpoint.
RESERVE_BYTES = 1 << 20

log = get_logger(__name__)


def take_reserve(run_dir: Path) -> None:
    """Write it. A disk that has no room for it has none for the run either, which will say so."""
    try:
        # Bytes that a file system cannot leave out or compress to nothing would be random; zeros do on those in use.
        write_bytes_atomic(run_dir / RESERVE_FILE, bytes(RESERVE_BYTES))
    except OSError as error:
        log.warning("disk reserve not taken", error=str(error))


def release_reserve(run_dir: Path) -> None:
    """Give it back; call before the run's last words."""
    try:
        (run_dir / RESERVE_FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("disk reserve not released", error=str(error))
