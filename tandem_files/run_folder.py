"""The folder of a run: its name, its lock, the launcher's notes, and the coordinator's state and summary."""

import fcntl
import itertools
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from servicekit.security.run_token import own_token
from tandem_files.atomic import write_json_atomic
from tandem_files.metrics_file import METRICS_FILE, MetricsFile, Row
from tandem_files.run_config import NEXT_CONFIG

# The run so far, after every iteration; and the run in one object, when it is over.
STATE_FILE = "state.json"
SUMMARY_FILE = "summary.json"
# The results of `tandem evaluate`.
EVALUATION_FILE = "evaluation.json"
_LOCK = ".lock"
_NOTES = "launcher.json"
_TOKEN = ".token"


@dataclass(frozen=True, kw_only=True)
class LauncherNotes:
    """What `tandem status` needs to find a running run; no secrets, so the Redis URL is not in it.

    Attributes:
        pid: process id of the launcher.
        run_id: name of the run in Redis.
        coordinator: its address; "" until it is known.
    """

    pid: int
    run_id: str
    coordinator: str = ""


@contextmanager
def claimed(output_dir: Path, name: str) -> Iterator[Path]:
    """Create and lock the folder of a new run: `name`, or `name-2`, `name-3`, ... if that one is in use or has results.

    Earlier results are never changed. An existing empty folder is used.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = output_dir / (name if number == 1 else f"{name}-{number}")
        with ExitStack() as stack:
            # Checked again under the lock: two concurrent launchers must not both find it empty.
            if _is_free(folder) and _try_lock(folder, stack) and _is_free(folder):
                yield folder
                return


def _is_free(folder: Path) -> bool:
    """Whether the folder does not exist or is empty."""
    return not folder.exists() or (folder.is_dir() and all(entry.name == _LOCK for entry in folder.iterdir()))


def _try_lock(folder: Path, stack: ExitStack) -> bool:
    try:
        folder.mkdir(exist_ok=True)
        stack.enter_context(locked(folder))
    except (ConfigError, FileExistsError):
        return False
    return True


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock the run's folder; the kernel unlocks it if this process dies.

    Raises: ConfigError: another launcher has locked it.
    """
    with (run_dir / _LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(busy_message(run_dir)) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def is_locked(run_dir: Path) -> bool:
    """Whether a launcher is running this run now."""
    try:
        with (run_dir / _LOCK).open("r", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def busy_message(run_dir: Path) -> str:
    """Return the message that another process has locked the folder."""
    try:
        owner = (run_dir / _LOCK).read_text(encoding="utf-8").strip()
    except OSError:
        owner = ""
    process = f"process {owner}" if owner else "another process"
    return f"{run_dir} is being run by {process}; watch it with `tandem status {run_dir}`, or stop it first"


def write_notes(run_dir: Path, notes: LauncherNotes) -> None:
    """Replace the notes atomically."""
    write_json_atomic(run_dir / _NOTES, asdict(notes), durable=False)


def read_notes(run_dir: Path) -> LauncherNotes | None:
    """Read the notes of the latest launch; None if there are none that can be read."""
    noted = _read_object(run_dir / _NOTES)
    try:
        return None if noted is None else LauncherNotes(**noted)
    except TypeError:
        return None


def has_begun(run_dir: Path) -> bool:
    """Whether the current launch has trained an iteration; those before a resume do not count."""
    return not (run_dir / NEXT_CONFIG).exists() and bool(metrics_rows(run_dir))


def make_token(run_dir: Path) -> str:
    """Make a new token for the calls of this launch, in a file that only its owner can read."""
    token = secrets.token_hex(32)
    path = run_dir / _TOKEN
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(token)
    return token


def read_token(run_dir: Path) -> str:
    """Read the token of the latest launch; without one, return this process's own.

    Raises: ConfigError: the file belongs to another user.
    """
    try:
        return (run_dir / _TOKEN).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return own_token()
    except OSError as error:
        raise ConfigError(f"{run_dir / _TOKEN}: {error}; ask the user who started the run") from None


def metrics_rows(run_dir: Path) -> list[Row]:
    """Read the complete rows of metrics.jsonl; none if it cannot be read."""
    try:
        return MetricsFile(run_dir / METRICS_FILE).rows()
    except OSError:
        return []


def read_state(run_dir: Path) -> dict[str, Any]:
    """Read state.json, the coordinator's latest state; empty if it cannot be read."""
    return _read_object(run_dir / STATE_FILE) or {}


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read summary.json; None if the run has none (yet)."""
    return _read_object(run_dir / SUMMARY_FILE)


def read_evaluation(folder: Path) -> dict[str, Any] | None:
    """Read evaluation.json; None if there is none that can be read."""
    return _read_object(folder / EVALUATION_FILE)


def _read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None if that fails."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def noted_troubles(run_dir: Path) -> tuple[str, ...]:
    """Read the troubles of the training after the last iteration, as sentences."""
    noted = read_state(run_dir).get("troubles")
    return tuple(str(text) for text in noted) if isinstance(noted, list) else ()
