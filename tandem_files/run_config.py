"""The configuration files in a run's folder, and when one replaces the other.

config.resolved.yaml   configuration of the run so far; `--resume` starts from it
config.next.yaml       configuration of a resume until its first iteration is done; then it replaces the other
logs/config.yaml       configuration of the last launch's services

So a resume that fails with a changed configuration leaves a run that can still be resumed with its own.
"""

from pathlib import Path

from tandem_files.atomic import sync_folder

RESOLVED_CONFIG = "config.resolved.yaml"
NEXT_CONFIG = "config.next.yaml"
LAUNCHED_CONFIG = "logs/config.yaml"


def adopt_next(run_dir: Path) -> bool:
    """Make the next configuration, with which an iteration has been trained, the run's.

    Returns: whether there was one.
    Raises: OSError.
    """
    try:
        (run_dir / NEXT_CONFIG).replace(run_dir / RESOLVED_CONFIG)
    except FileNotFoundError:
        return False
    sync_folder(run_dir)
    return True
