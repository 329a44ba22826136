"""The configuration in a run's folder, and when another one takes its place.

config.resolved.yaml   what the run has been trained with; `--resume` goes on with it
config.next.yaml       what a resume wants instead, until its first iteration is done: then it becomes the other
logs/config.yaml       what the services of the last launch were started with

So a resume that fails, whatever was changed for it, leaves a run that goes on as before.
"""

from pathlib import Path

from tandem_files.atomic import sync_folder

RESOLVED_CONFIG = "config.resolved.yaml"
NEXT_CONFIG = "config.next.yaml"
LAUNCHED_CONFIG = "logs/config.yaml"


def adopt_next(run_dir: Path) -> bool:
    """An iteration has been trained with the next configuration: it becomes the run's. Returns: whether there was one.

    Raises: OSError.
    """
    try:
        (run_dir / NEXT_CONFIG).replace(run_dir / RESOLVED_CONFIG)
    except FileNotFoundError:
        return False
    sync_folder(run_dir)
    return True
