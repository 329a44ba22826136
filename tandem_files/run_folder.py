"""The folder of a run: name and owner, lock, launcher's notes, number of replicas, coordinator's state and summary."""

import errno
import fcntl
import itertools
import json
import os
import secrets
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from servicekit.errors import ConfigError
from servicekit.security.run_token import own_token
from tandem_files.atomic import naming, no_check, write_json_atomic
from tandem_files.checkpoints import list_complete, read_complete
from tandem_files.metrics_file import METRICS_FILE, MetricsFile, Row
from tandem_files.run_config import NEXT_CONFIG

# The run so far, after every iteration; and the run in one object, when it is over.
STATE_FILE = "state.json"
SUMMARY_FILE = "summary.json"
# The results of `tandem evaluate`.
EVALUATION_FILE = "evaluation.json"
# Which run the folder belongs to.
RUN_FILE = "run.json"
_LOCK = ".lock"
_NOTES = "launcher.json"
# How many replicas the run has, and how many `tandem scale` has asked for last.
SCALE_FILE, _WISH = "scale.json", "scale.wish.json"
_TOKEN = ".token"
_NUMBERS = ("replicas", "configured")


N = TypeVar("N", "Scale", "Wish")


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


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Whose folder it is: the content of run.json.

    Attributes:
        run_id: the run's id, also in its checkpoints; it stays the same over all restarts and resumes.
        launch_id: of a run of `tandem run`: the name of its latest launch in Redis, by which its services know it.
    """

    run_id: str
    launch_id: str = ""

    @property
    def is_launched(self) -> bool:
        """Whether `tandem run` runs it, which names the run by its folder."""
        return bool(self.launch_id)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many replicas there should be: written by who sets their number, the launcher or a cluster's coordinator.

    Attributes:
        configured: rollout.replicas of then: where a configuration has another number, that one counts.
        launch_id: of the launcher that follows wishes.
        wish_id: of the wish that it has looked at last.
        refused: why it did not follow that one; "": it has.
    """

    replicas: int
    configured: int
    launch_id: str = ""
    wish_id: str = ""
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What `tandem scale` asks for; the latest one counts, until a launcher has looked at it."""

    replicas: int
    wish_id: str


def claim_run_dir(run_dir: Path, run_id: str) -> RunIdentity:
    """Make the folder of a run, unless it is there, and check that it is this run's.

    All processes of a run may do this at the same time. Only the last part of the path is made, so that results never
    go where a volume should have been mounted.

    Args:
        run_id: as in the process's environment: TANDEM_RUN_ID.
    Raises: ConfigError: the folder cannot be made or read, or is another run's.
    """
    try:
        run_dir.mkdir(exist_ok=True)
        identity = read_identity(run_dir) or _create_identity(run_dir, run_id)
    except FileNotFoundError:
        raise ConfigError(
            f"environment variable TANDEM_RUN_DIR='{run_dir}' is wrong: neither it nor the folder above it exists: "
            "is its volume mounted?"
        ) from None
    except OSError as error:
        raise ConfigError(f"environment variable TANDEM_RUN_DIR='{run_dir}' is wrong: {error}") from error
    if run_id not in (identity.run_id, identity.launch_id):
        raise ConfigError(
            f"{run_dir} is the folder of run {identity.run_id!r} ({RUN_FILE}), and this is run {run_id!r} "
            "(TANDEM_RUN_ID): give this run a folder of its own (TANDEM_RUN_DIR), or resume the other one by its id"
        )
    return identity


def note_launch(run_dir: Path, launch_id: str) -> RunIdentity:
    """Note a new launch of `tandem run` in the folder, which it has locked; the run keeps its id.

    Raises: ConfigError: run.json cannot be understood; OSError.
    """
    known = read_identity(run_dir)
    run_id = (_id_of_checkpoints(run_dir) or launch_id) if known is None else known.run_id
    identity = RunIdentity(run_id=run_id, launch_id=launch_id)
    write_json_atomic(run_dir / RUN_FILE, asdict(identity))
    return identity


def read_identity(run_dir: Path) -> RunIdentity | None:
    """Read whose folder it is; None: it does not say. Raises: ConfigError: the file cannot be understood; OSError."""
    path = run_dir / RUN_FILE
    try:
        identity = RunIdentity(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} does not say whose folder it is ({error}): restore it from a backup") from error
    if not isinstance(identity.run_id, str) or not isinstance(identity.launch_id, str):
        raise ConfigError(f"{path} does not say whose folder it is: restore it from a backup")
    return identity


def run_id_of(run_dir: Path | None) -> str:
    """Return the id of the run whose folder it is, for marks; "": there is none, or it cannot be read."""
    try:
        identity = None if run_dir is None else read_identity(run_dir)
    except (ConfigError, OSError):
        identity = None
    return "" if identity is None else identity.run_id


def _create_identity(run_dir: Path, run_id: str) -> RunIdentity:
    """Make run.json, unless another process was first. Returns: what it says."""
    identity = RunIdentity(run_id=_id_of_checkpoints(run_dir) or run_id)
    path = run_dir / RUN_FILE
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    write_json_atomic(temporary, asdict(identity))
    try:
        with naming(path):
            os.link(temporary, path)  # fails if the file is there, whoever made it
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        temporary.rename(path)  # a file system without links, as some of object stores
    finally:
        temporary.unlink(missing_ok=True)
    return read_identity(run_dir) or identity


def _id_of_checkpoints(run_dir: Path) -> str:
    """Return the run id of the newest checkpoint that has one, e.g. of a restored folder; "": none has."""
    for _, folder in reversed(list_complete(run_dir)):
        try:
            found = read_complete(folder).get("run_id")
        except ConfigError:
            continue
        if isinstance(found, str):
            return found
    return ""


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


def write_scale(run_dir: Path, noted: Scale | Wish, before_write: Callable[[], None] = no_check) -> None:
    """Replace the scale, or the wish, atomically. Takes: as write_bytes_atomic. Raises: OSError."""
    path = run_dir / (SCALE_FILE if isinstance(noted, Scale) else _WISH)
    try:
        write_json_atomic(path, asdict(noted), before_write)
    except FileNotFoundError:  # a coordinator that takes the folder over (leader.py), which leads no launcher
        write_json_atomic(path, asdict(noted), before_write)


def read_scale(run_dir: Path) -> Scale | None:
    """Read how many replicas there should be; None: it was not set. Raises: ConfigError: the file is damaged."""
    return _read_noted(run_dir / SCALE_FILE, Scale)


def read_wish(run_dir: Path) -> Wish | None:
    """Read what `tandem scale` asks for; None: nothing yet. Raises: ConfigError: the file is damaged, or another's."""
    return _read_noted(run_dir / _WISH, Wish)


def scale_of(run_dir: Path, configured: int) -> int:
    """Return how many replicas there should be, of a run whose configuration has `configured`."""
    try:
        noted = read_scale(run_dir)
    except ConfigError:
        return configured
    return configured if noted is None or noted.configured != configured else noted.replicas


def _read_noted(path: Path, kind: type[N]) -> N | None:
    try:
        if path.stat().st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise ConfigError(f"{path} is of another user than the run: remove it")
        noted = kind(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): remove it, and scale again") from error
    if any(type(number) is not int or number < 1 for name, number in vars(noted).items() if name in _NUMBERS):
        raise ConfigError(f"{path} has no number of replicas: remove it, and scale again")
    return noted


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
