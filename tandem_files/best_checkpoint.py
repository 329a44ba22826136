"""The mark of a run's best checkpoint, which is kept beside the newest ones.

<run_dir>/checkpoints/best.json   {"iteration": 40, "policy_version": 40, "metric": "heldout/mean@1", "value": 0.91}
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem_files.atomic import nothing_more, write_json_atomic

BEST_FILE = "best.json"


@dataclass(frozen=True, kw_only=True)
class BestCheckpoint:
    """Which checkpoint is the best, by which metric (evaluation.best)."""

    iteration: int
    policy_version: int
    metric: str
    value: float


def write_best(checkpoints: Path, best: BestCheckpoint, last_look: Callable[[], None] = nothing_more) -> None:
    """Mark a complete checkpoint as the best, durably.

    Args:
        checkpoints: folder of the run's checkpoints.
        last_look: as in write_bytes_atomic.
    """
    write_json_atomic(checkpoints / BEST_FILE, asdict(best), last_look)


def read_best(checkpoints: Path) -> BestCheckpoint | None:
    """Read the mark; None if there is none that can be read."""
    try:
        return BestCheckpoint(**json.loads((checkpoints / BEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
