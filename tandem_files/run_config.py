"""The configuration files in a run's folder, and when one replaces the other.

config.resolved.yaml   configuration of the run so far; `--resume` starts from it
config.next.yaml       configuration of a resume until its first iteration is done; then it replaces the other
logs/config.yaml       configuration of the last launch's services

So a resume that fails with a changed configuration leaves a run that can still be resumed with its own. `tandem run`
writes these files; where it does not run, as in a cluster, the coordinator writes the first two.
"""

from collections.abc import Callable
from pathlib import Path

from tandem_files.atomic import no_check, remove_each, write_bytes_atomic

RESOLVED_CONFIG = "config.resolved.yaml"
NEXT_CONFIG = "config.next.yaml"
LAUNCHED_CONFIG = "logs/config.yaml"


def adopt_next(run_dir: Path, before_write: Callable[[], None] = no_check) -> bool:
    """Make the next configuration, with which an iteration has been trained, the run's.

    Args:
        before_write: as in write_bytes_atomic.
    Returns: whether there was one.
    Raises: OSError.
    """
    try:
        resolved = (run_dir / NEXT_CONFIG).read_bytes()
    except FileNotFoundError:
        return False
    write_bytes_atomic(run_dir / RESOLVED_CONFIG, resolved, before_write)
    remove_each([run_dir / NEXT_CONFIG], before_write)
    return True


def note_config(run_dir: Path, resolved: str, before_write: Callable[[], None] = no_check) -> None:
    """Write a run's configuration into its folder: as the run's own if it has none, else as the next one.

    Args:
        resolved: as YAML.
        before_write: as in write_bytes_atomic.
    Raises: OSError.
    """
    own = run_dir / RESOLVED_CONFIG
    if not own.is_file():
        write_bytes_atomic(own, resolved.encode(), before_write)
    elif own.read_text(encoding="utf-8") == resolved:
        remove_each([run_dir / NEXT_CONFIG], before_write)  # of a resume that trained nothing
    else:
        write_bytes_atomic(run_dir / NEXT_CONFIG, resolved.encode(), before_write)
