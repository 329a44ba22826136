"""Finds a run's checkpoints and checks whether they are complete and undamaged.

<run_dir>/checkpoints/step-00000012/trainer/...        written by the trainer, with a manifest (digests.py)
                                    coordinator.json   written by the coordinator
                                    complete.json      written last: without it the checkpoint is unfinished
                                    kept               it is not removed when it is old (`keep_checkpoint`)
                      damaged-step-00000016/           complete once, then found damaged, and skipped
                      best.json                        which one is the best (evaluation.best)
                      latest                           name of the newest complete one, for other programs

complete.json holds digests: its own, and of every file of the checkpoint that is not in a manifest.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from tandem_files.atomic import (
    LEFT,
    NotRemoved,
    make_way,
    no_check,
    remove_each,
    sync_folder,
    write_bytes_atomic,
    write_json_atomic,
)
from tandem_files.digests import MANIFEST, damages, file_digest, read_manifest, text_digest

COMPLETE = "complete.json"
COORDINATOR_FILE = "coordinator.json"
TRAINER_FOLDER = "trainer"
FOLDER = "checkpoints"
BEST_FILE = "best.json"
LATEST_FILE = "latest"
KEPT_FILE = "kept"
_STEP = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(rf"\.step-\d{{8,}}{LEFT}")
_SET_ASIDE = "damaged-"
_FILES, _SELF = "files", "digest"


class DamagedCheckpoint(ConfigError):
    """A checkpoint's files are not as they were written; nothing was loaded from them."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A checkpoint that cannot be used, and why; `unfinished`: it never was complete."""

    iteration: int
    folder: Path
    what: str
    unfinished: bool = False

    def __str__(self) -> str:
        """Describe the damage, e.g. `the checkpoint of iteration 8 is damaged (...)`."""
        is_so = "was not finished" if self.unfinished else "is damaged"
        return f"the checkpoint of iteration {self.iteration} {is_so} ({self.what})"


@dataclass(frozen=True, kw_only=True)
class UndamagedCheckpoint:
    """The newest undamaged checkpoint, and the newer ones that were skipped, newest first."""

    iteration: int
    folder: Path
    skipped: list[Damage]

    def complaints(self) -> list[str]:
        """List the warnings about resuming from this one."""
        return [f"{damage}: resuming from iteration {self.iteration}" for damage in self.skipped]


def step_folder(run_dir: Path, iteration: int) -> Path:
    """Return the folder of the checkpoint after `iteration`; it is not created.

    >>> str(step_folder(Path("runs/a"), 12))
    'runs/a/checkpoints/step-00000012'
    """
    if iteration < 0:
        raise ValueError(f"iteration must not be negative, got {iteration}")
    return run_dir / FOLDER / f"step-{iteration:08d}"


def mark_complete(folder: Path, before_write: Callable[[], None] = no_check, **fields: Any) -> None:
    """Mark a checkpoint as complete, when all of its files are on disk.

    Args:
        before_write: as in write_bytes_atomic.
        fields: JSON values to record about it.
    """
    if not folder.is_dir():
        raise ValueError(f"checkpoint folder {folder} does not exist; write the checkpoint before marking it")
    mark: dict[str, Any] = {**fields, _FILES: {name: file_digest(folder / name) for name in _uncovered(folder)}}
    write_json_atomic(folder / COMPLETE, {**mark, _SELF: _digest_of(mark)}, before_write)
    for parent in (folder.parent, folder.parent.parent):
        sync_folder(parent)


def _uncovered(folder: Path) -> list[str]:
    """List the files of a checkpoint, relative to it, that no manifest covers; manifests themselves are among them."""
    manifests = [path.parent for path in folder.glob(f"*/{MANIFEST}")]
    covered = {parent / name for parent in manifests for name in read_manifest(parent)}
    files = (path for path in folder.rglob("*") if path.is_file() and path not in covered and path.name != COMPLETE)
    return sorted(str(path.relative_to(folder)) for path in files)


def _digest_of(mark: dict[str, Any]) -> str:
    return text_digest(json.dumps(mark, sort_keys=True))


def read_complete(folder: Path) -> dict[str, Any]:
    """Return the fields that were given to mark_complete.

    Raises: ConfigError: the checkpoint is not complete, or its mark is damaged.
    """
    mark = _read_mark(folder)
    return {name: value for name, value in mark.items() if name != _FILES}


def _read_mark(folder: Path) -> dict[str, Any]:
    path = folder / COMPLETE
    try:
        mark = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder} is not a complete checkpoint ({error}); choose another one") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error})") from error
    if not isinstance(mark, dict):
        raise ConfigError(f"{path} is damaged: it holds {type(mark).__name__}, expected an object")
    digest = mark.pop(_SELF, None)
    if digest is None or _FILES not in mark:
        raise ConfigError(f"{path} has no digests: it is damaged, or was written by a release without digests")
    if digest != _digest_of(mark):
        raise ConfigError(f"{path} is damaged: its content is not what was written")
    return mark


def inspect(folder: Path, *, deep: bool) -> str:
    """Describe the damage of a complete checkpoint; "" if it has none.

    Args:
        deep: read every file; otherwise only those that complete.json lists itself, not the trainer's shards.
    """
    try:
        found = damages(folder, _read_mark(folder)[_FILES])
        if deep and not found:
            for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
                texts = damages(manifest.parent, read_manifest(manifest.parent))
                found += [f"{manifest.parent.name}/{text}" for text in texts]
    except (ConfigError, OSError, ValueError) as error:
        return str(error)
    return "; ".join(found)


def newest_sound(run_dir: Path, *, deep: bool = True) -> UndamagedCheckpoint | None:
    """Find the newest undamaged checkpoint; None if the run has no complete one.

    Args:
        deep: see `inspect`.
    Raises: DamagedCheckpoint: all complete ones are damaged; names each.
    """
    skipped: list[Damage] = []
    for iteration, folder in reversed(list_all(run_dir)):
        damage = _damage(iteration, folder, deep=deep)
        if damage is None:
            return UndamagedCheckpoint(iteration=iteration, folder=folder, skipped=skipped)
        skipped.append(damage)
    if all(damage.unfinished for damage in skipped):
        return None
    raise none_left(run_dir, skipped)


def choose(run_dir: Path, which: str) -> UndamagedCheckpoint:
    """Find a checkpoint for a user, and read every file of it to see that it is undamaged.

    Args:
        which: "last", "best" or an iteration.
    Raises: ConfigError: there is none, or it is damaged; names those that there are.
    """
    if which == "last":
        sound = newest_sound(run_dir)
        if sound is None:
            raise ConfigError(f"{run_dir} has no complete checkpoint yet")
        return sound
    there = dict(list_complete(run_dir))
    if which == "best":
        best = read_best(run_dir)
        if best is None or best.iteration not in there:
            raise ConfigError(f"{run_dir} {_why_no_best(there)}: give an iteration, {_listed(there)}")
        which = str(best.iteration)
    if not which.isdecimal():
        raise ConfigError(f"there is no checkpoint {which!r}: give last, best or an iteration, {_listed(there)}")
    folder = there.get(int(which))
    if folder is None:
        raise ConfigError(
            f"{run_dir} has no checkpoint of iteration {which}: give last, best or an iteration, {_listed(there)}"
        )
    damage = _damage(int(which), folder, deep=True)
    if damage is not None:
        raise DamagedCheckpoint(f"{damage}: choose another one, {_listed(there)}")
    return UndamagedCheckpoint(iteration=int(which), folder=folder, skipped=[])


def _why_no_best(there: Mapping[int, Path]) -> str:
    """Say why no checkpoint is the best: by the state of the newest, the best policy is that before the training."""
    try:
        best = json.loads((there[max(there)] / COORDINATOR_FILE).read_text(encoding="utf-8"))["best"]
        if best["iteration"] == 0:
            return (
                f"has no best checkpoint: by evaluation.best the best policy is the one before the training "
                f"({best['metric']} {best['value']:.3f}), the model in model.path"
            )
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return "has no best checkpoint (evaluation.best)"


def _listed(there: Collection[int]) -> str:
    return f"here {', '.join(map(str, there))}" if there else "of which there is none yet"


def usable(run_dir: Path) -> tuple[list[tuple[int, Path]], list[Damage]]:
    """List the complete checkpoints whose small files are undamaged, newest first, and the other ones.

    Returns: (iteration, folder) of each; the damage of the others.
    Raises: DamagedCheckpoint: all complete ones are damaged.
    """
    found: list[tuple[int, Path]] = []
    unusable: list[Damage] = []
    for iteration, folder in reversed(list_all(run_dir)):
        damage = _damage(iteration, folder, deep=False)
        if damage is None:
            found.append((iteration, folder))
        else:
            unusable.append(damage)
    if not found and any(not damage.unfinished for damage in unusable):
        raise none_left(run_dir, unusable)
    return found, unusable


def newest_iteration(run_dir: Path) -> int | None:
    """Return the iteration of the newest usable checkpoint, by its small files; None if there is none. For messages."""
    try:
        found, _ = usable(run_dir)
    except DamagedCheckpoint:
        return None
    return found[0][0] if found else None


def _damage(iteration: int, folder: Path, *, deep: bool) -> Damage | None:
    if not (folder / COMPLETE).is_file():
        return Damage(iteration=iteration, folder=folder, what=f"it has no {COMPLETE}", unfinished=True)
    what = inspect(folder, deep=deep)
    return Damage(iteration=iteration, folder=folder, what=what) if what else None


def none_left(run_dir: Path, damages: Sequence[object]) -> DamagedCheckpoint:
    """Make the error that no checkpoint of a run can be used.

    Args:
        damages: descriptions, or objects whose str() is one.
    """
    return DamagedCheckpoint(
        f"no checkpoint in {run_dir / FOLDER} can be used: {'; '.join(map(str, damages))}: "
        "restore one from a backup, or start a new run"
    )


def set_aside(damage: Damage, before_write: Callable[[], None] = no_check) -> Path | None:
    """Rename a damaged checkpoint, so that it can be inspected and is not in the way of new ones.

    Returns: its new folder; None: it was not renamed: it is unfinished or does not exist. Takes: as remove_each.
    """
    aside = damage.folder.with_name(f"{_SET_ASIDE}{damage.folder.name}")
    if damage.unfinished or not damage.folder.exists():
        return None
    make_way(aside, before_write)
    inode = damage.folder.stat().st_ino
    before_write()
    if damage.folder.stat().st_ino != inode:  # made anew by whoever has taken over
        return None
    damage.folder.rename(aside)
    sync_folder(aside.parent)
    return aside


def list_complete(run_dir: Path) -> list[tuple[int, Path]]:
    """List every complete checkpoint as (iteration, folder), oldest first."""
    return [(iteration, folder) for iteration, folder in list_all(run_dir) if (folder / COMPLETE).is_file()]


@dataclass(frozen=True, kw_only=True)
class BestCheckpoint:
    """The content of best.json: which checkpoint is the best, by which metric (evaluation.best)."""

    iteration: int
    policy_version: int
    metric: str
    value: float


def read_best(run_dir: Path) -> BestCheckpoint | None:
    """Read the mark of the best checkpoint; None if there is none that can be read."""
    try:
        return BestCheckpoint(**json.loads((run_dir / FOLDER / BEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def mark_best(run_dir: Path, best: BestCheckpoint | None, before_write: Callable[[], None] = no_check) -> bool:
    """Mark the best checkpoint, durably, if it is complete; without a best one remove the mark.

    Args:
        before_write: as in write_bytes_atomic.
    Returns: whether it is marked now.
    """
    path = run_dir / FOLDER / BEST_FILE
    if best is None:
        remove_each([path], before_write)
        return False
    if best.iteration not in dict(list_complete(run_dir)):
        return False
    if best != read_best(run_dir):
        write_json_atomic(path, asdict(best), before_write)
    return True


def keep_checkpoint(run_dir: Path, iteration: int, before_write: Callable[[], None] = no_check) -> None:
    """Keep a complete checkpoint, if it is there, until a user removes its folder. Raises: OSError."""
    folder = step_folder(run_dir, iteration)
    if (folder / COMPLETE).is_file():
        write_bytes_atomic(folder / KEPT_FILE, b"remove this folder when you do not need it\n", before_write)


def is_kept(folder: Path) -> bool:
    """Whether `keep_checkpoint` has been called for a checkpoint."""
    return (folder / KEPT_FILE).is_file()


def mark_latest(run_dir: Path, before_write: Callable[[], None] = no_check) -> None:
    """Write the name of the newest complete checkpoint's folder into `latest`; without one remove the file.

    It is for people and other programs: a resume looks for the newest undamaged checkpoint itself.

    Args:
        before_write: as in write_bytes_atomic.
    """
    path, complete = run_dir / FOLDER / LATEST_FILE, list_complete(run_dir)
    if not complete:
        remove_each([path], before_write)
        return
    write_bytes_atomic(path, f"{complete[-1][1].name}\n".encode(), before_write)


def prune(run_dir: Path, keep: int, before_write: Callable[[], None] = no_check) -> list[Path]:
    """Remove all but the best, kept and `keep` newest complete checkpoints, and unfinished ones older than the newest.

    An unfinished folder newer than every complete one stays: it is being written. What could not be removed before goes
    first.

    Returns: the folders that were removed. Takes: as remove_each.
    Raises: NotRemoved: some could not be; the others are gone. A checkpoint of which a part is left has no mark.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    complete = list_complete(run_dir)
    if not complete:
        return []
    best = read_best(run_dir)
    kept = {folder for iteration, folder in complete if best is not None and iteration == best.iteration}
    kept |= {folder for _, folder in complete[-keep:]} | {folder for _, folder in complete if is_kept(folder)}
    newest = complete[-1][0]
    old = [folder for iteration, folder in list_all(run_dir) if iteration <= newest and folder not in kept]
    old.sort(key=lambda folder: (folder / COMPLETE).is_file())
    left = remove_each(path for path in (run_dir / FOLDER).iterdir() if _LEFT.fullmatch(path.name))
    left += [text for folder in old for text in remove_checkpoint(folder, before_write)]
    if left:
        raise NotRemoved(left)
    return sorted(old)


def remove_checkpoint(folder: Path, before_write: Callable[[], None] = no_check) -> list[str]:
    """Remove a checkpoint as far as possible; of one that is linked, the link. Returns and takes as remove_each."""
    # The mark first, so that a crash in between leaves no partial checkpoint that counts as complete.
    return remove_each([folder], before_write, first=COMPLETE)


def list_all(run_dir: Path) -> list[tuple[int, Path]]:
    """List every checkpoint as (iteration, folder), oldest first, unfinished ones too."""
    root = run_dir / FOLDER
    if not root.is_dir():
        return []
    matches = ((_STEP.fullmatch(folder.name), folder) for folder in root.iterdir() if folder.is_dir())
    return sorted((int(match[1]), folder) for match, folder in matches if match is not None)
