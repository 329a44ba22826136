"""Which coordinator may write a run's folder, and how its successor shuts it out.

Between (a) and (b) of each change a coordinator checks that leader.json still has its own name:

                        (a)                           (b)
a file is replaced      a temporary file is written   it is renamed
a file is appended to   it is opened                  bytes are written
a folder is removed     it is opened                  what it holds is removed

Whoever takes over writes its own name, then removes the temporary files, then copies the files that are appended to,
which so have new inodes. A change whose check came before that fails, or is made to what has no name any more. So no
reader meets what a coordinator has written after it was replaced, and none has to know of it. A removal can come late:
of what there was when it was checked, and not of what has been made since.
"""

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from servicekit.errors import Fenced
from servicekit.logs import get_logger
from tandem_files.atomic import naming, no_check, sync_file, sync_folder, write_json_atomic
from tandem_files.exports import CHAT_TEMPLATE
from tandem_files.ledger.life import LIFE_FILE
from tandem_files.ledger.records import groups_files, segments, step_files
from tandem_files.metrics_file import METRICS_FILE
from tandem_files.run_config import NEXT_CONFIG, RESOLVED_CONFIG
from tandem_files.run_folder import SCALE_FILE, STATE_FILE, SUMMARY_FILE

LEADER_FILE = "leader.json"
FAILURES_FILE = "failures.json"
PLACEMENT_FILE = "placement.json"
# Files of the run's folder that coordinators replace, and folders with such files. The launcher writes sizes, too.
REPLACED = (
    *(LEADER_FILE, STATE_FILE, SUMMARY_FILE, METRICS_FILE, LIFE_FILE, FAILURES_FILE),
    *(RESOLVED_CONFIG, NEXT_CONFIG, CHAT_TEMPLATE, PLACEMENT_FILE, SCALE_FILE),
)
_FOLDERS = ("checkpoints", "checkpoints/step-*", "samples", "ledger")

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class FolderLeader:
    """The content of leader.json: the coordinator that leads the run, or led it last, by its fence."""

    worker_id: str
    token: int

    def check(self, run_dir: Path) -> None:
        """Check that no other coordinator has taken the folder. Raises: Fenced: one has; OSError."""
        newest = read_leader(run_dir)
        if newest not in (None, self):
            raise Fenced(f"coordinator {newest.worker_id} has taken over the run: {run_dir / LEADER_FILE} names it")


def read_leader(run_dir: Path) -> FolderLeader | None:
    """Read who leads the run, or led it last; None: the file does not say it, as in folders of older releases.

    Raises: OSError.
    """
    try:
        return FolderLeader(**json.loads((run_dir / LEADER_FILE).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def read_failures(run_dir: Path) -> dict[str, Any]:
    """Read the count of failures in a row (coordinator/retries.py); empty: there is none.

    Raises: OSError; ValueError: it is damaged.
    """
    try:
        noted = json.loads((run_dir / FAILURES_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(noted, dict):
        raise ValueError(f"{FAILURES_FILE} is no object")
    return noted


def take_folder(run_dir: Path, leader: FolderLeader, before_write: Callable[[], None] = no_check) -> None:
    """Take a run's folder over; read its files after that only.

    Args:
        before_write: raises if yet another coordinator leads the run.
    Raises: OSError: leader.json cannot be written; Fenced: yet another one has taken the folder meanwhile.
    """
    before_write()
    _remove_temporary(run_dir)  # leader.json's own: one before us may be about to rename it
    write_json_atomic(run_dir / LEADER_FILE, asdict(leader), before_write)
    leader.check(run_dir)
    _remove_temporary(run_dir)
    newest = (*list(segments(run_dir).values())[-1:], *list(step_files(run_dir).values())[-1:])
    ledger = (*groups_files(run_dir).values(), *newest)
    for path in (run_dir / METRICS_FILE, run_dir / LIFE_FILE, *ledger):
        try:
            _renew(path, partial(leader.check, run_dir))
        except FileNotFoundError:
            continue
        except OSError as error:  # e.g. a full disk: the check before each write is left
            log.warning("file not copied: a replaced coordinator could still append to it", error=str(error))


def _remove_temporary(run_dir: Path) -> None:
    for pattern in (*(f".{name}.*.tmp" for name in REPLACED), *(f"{folder}/.*.tmp" for folder in _FOLDERS)):
        for path in run_dir.glob(pattern):
            path.unlink(missing_ok=True)


def _renew(path: Path, check: Callable[[], None]) -> None:
    """Replace a file by its copy, unless another coordinator has it open by now. Raises: OSError; as check."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with naming(path):
        try:
            shutil.copy2(path, temporary)  # with its time: when the one before wrote last (watch/life.py)
            sync_file(temporary)
            check()
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
