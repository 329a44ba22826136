"""The open files of a run's ledger. One thread calls all of it, so that a slow disk does not delay the run."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from servicekit.logs import get_logger
from tandem_files.atomic import naming, remove_each, sync_folder
from tandem_files.checkpoints import list_complete
from tandem_files.ledger.records import groups_file, groups_files, segment, segments, step_file, step_files

# What a power cut may cost of the groups that are finished.
SYNC_EVERY_S = 1.0
_MIB = 1 << 20

log = get_logger(__name__)


class _File:
    """A file that is appended to; it is made by the first call.

    Args:
        check: called before each write; raises if another coordinator leads the run.
        empty: what the file has is of no use.
    """

    def __init__(self, path: Path, check: Callable[[], None], *, empty: bool) -> None:
        self._path, self._check, self._empty = path, check, empty
        self._descriptor = -1
        self.size = 0

    def append(self, content: bytes) -> None:
        """Append all of it or nothing. Raises: OSError: with the file's name."""
        with naming(self._path):
            if self._descriptor < 0:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                sync_folder(self._path.parent)
            self._check()  # of a file that is open (tandem_files/leader.py)
            if self._empty:
                os.ftruncate(self._descriptor, 0)
            self._empty, self.size = False, os.fstat(self._descriptor).st_size
            left = memoryview(content)
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                os.ftruncate(self._descriptor, self.size)
                raise
        self.size += len(content)

    def sync(self) -> None:
        """Force it to disk. Raises: OSError: with the file's name."""
        if self._descriptor >= 0:
            with naming(self._path):
                os.fdatasync(self._descriptor)

    def take(self) -> bytes:
        """Return what it has, as far as that can be read, and take its room."""
        content = b""
        with contextlib.suppress(OSError):
            content = b"" if self._empty else self._path.read_bytes()
        self.empty()
        self.size = 0
        return content

    def empty(self) -> None:
        """Take its room, as far as possible."""
        with contextlib.suppress(OSError):
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            self._check()
            os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LedgerFiles:
    """A segment of the log, the finished groups of the waves under way, and the steps after the newest checkpoint.

    Args:
        max_mib: run.ledger_max_mib.
        check: as of _File.
    Attributes:
        remarks: what could not be kept, as sentences for the run's user.
        wants_checkpoint: steps are not kept, because the disk was full, and has room again.
    """

    def __init__(self, run_dir: Path, max_mib: int, check: Callable[[], None]) -> None:
        self._run_dir, self._check = run_dir, check
        self._max_bytes = max_mib * _MIB
        self._log: _File | None = None
        self._groups: dict[int, _File] = {}
        # What they have no room for, by wave, and for which waves there is a remark.
        self._held: dict[int, bytes] = {}
        self._remarked: set[int] = set()
        # Records for the log: they wait while the disk has no room.
        self._waiting: list[bytes] = []
        self._others = 0  # bytes of the groups of other waves
        self._sealed: dict[int, int] = {}  # bytes of the segments before the newest one that are needed
        self._is_large = False  # they are more than the bound
        self._steps = {number: path.stat().st_size for number, path in step_files(run_dir).items()}
        self._lost_step = 0  # steps up to this one are not kept; 0: all since the newest checkpoint are
        self._failed: OSError | None = None  # why the last one is not
        self._synced_s = 0.0
        self.remarks: list[str] = []
        self.wants_checkpoint = False

    def begin_segment(self, number: int, head: Callable[[int], bytes]) -> bool:
        """Begin a segment, and seal the one before. Returns: False: not yet, because records wait for that one.

        Args:
            head: makes the first record, with the bytes of the segment before.
        """
        if self._log is not None:
            try:
                self.sync()
            except OSError:
                return False
            self._log.close()
        before = segment(self._run_dir, number - 1)
        self._log = _File(segment(self._run_dir, number), self._check, empty=True)
        self.append(head(before.stat().st_size if before.exists() else 0))
        self.write()
        return True

    def append(self, content: bytes) -> None:
        """Append a record to the log with the next write()."""
        self._waiting.append(content)

    def begin_groups(self, wave: int, *, keep: bool) -> None:
        """Begin the file of a wave's finished groups. keep: continue with those that it has."""
        own = groups_file(self._run_dir, wave)
        self._groups[wave] = _File(own, self._check, empty=not keep)
        others = [path for number, path in groups_files(self._run_dir).items() if number not in self._groups]
        self._others = sum(path.stat().st_size for path in others)

    def append_groups(self, wave: int, content: bytes) -> None:
        """Append finished groups with the next write(); beyond the bound their wave is given up."""
        if wave not in self._groups:
            return
        try:
            self._check_room(len(content))
        except OSError as error:
            self.remarks.append(f"a crash would cost the finished groups of this iteration, they are not kept: {error}")
            self._groups[wave].empty()
            self._forget(wave)
            return
        self._held[wave] = self._held.get(wave, b"") + content

    def write(self) -> None:
        """Write what waits, groups before the records that have them as finished. What finds no room waits further."""
        self._write_held()
        with contextlib.suppress(OSError):
            self._flush()
        if self._groups and time.monotonic() - self._synced_s > SYNC_EVERY_S:
            with contextlib.suppress(OSError):  # a step's own sync tells of it
                self.sync()

    def _write_held(self) -> None:
        """Write the groups that wait for room, as far as there is some."""
        for wave, content in list(self._held.items()):
            try:
                self._groups[wave].append(content)
                del self._held[wave]
                self._remarked.discard(wave)
            except OSError as error:
                self._held[wave] = self._groups[wave].take() + content  # its room may be what others need
                if wave not in self._remarked:
                    self._remarked.add(wave)
                    what = "until there is room, a crash would cost the finished groups of this iteration"
                    self.remarks.append(f"{what}: {error}")

    def _forget(self, wave: int) -> None:
        self._groups.pop(wave).close()
        self._held.pop(wave, None)
        self._remarked.discard(wave)

    def keep_step(self, iteration: int, records: Iterable[bytes]) -> None:
        """Keep an iteration's train step; if one cannot be kept, none is until there is a checkpoint after it."""
        if self._failed is not None and self._failed.errno is None:  # beyond the bound
            self._lost_step = iteration
            return
        self._steps[iteration], step = 0, _File(step_file(self._run_dir, iteration), self._check, empty=True)
        try:
            for content in records:
                self._check_room(len(content))
                step.append(content)
                self._steps[iteration] = step.size
            self.wants_checkpoint |= self._failed is not None
            self._failed = None
        except OSError as error:
            what = "the loss of the trainer would cost the iterations since the checkpoint, they are not kept"
            self.remarks += [] if self._lost_step else [f"{what}: {error}"]
            step.empty()  # it may fill the disk
            self._remove_steps(iteration)
            self._lost_step, self._failed = iteration, error
        finally:
            step.close()

    def _check_room(self, num_bytes: int) -> None:
        kept = self._others + sum(file.size for file in self._groups.values()) + sum(self._steps.values())
        kept += sum(map(len, self._held.values()))
        if kept + num_bytes > self._max_bytes:
            raise OSError(f"they take more than run.ledger_max_mib ({self._max_bytes // _MIB} MiB)")

    def _remove_steps(self, until: int) -> None:
        old = [number for number in self._steps if number <= until]
        for text in remove_each([step_file(self._run_dir, number) for number in old], self._check):
            log.warning("ledger: not removed", what=text)
        for number in old:
            del self._steps[number]

    def sync(self) -> None:
        """Force everything to disk. Raises: OSError: the log is not there, and waits; TandemError: of `check`."""
        self._write_held()
        self._flush()
        for file in (*self._groups.values(), self._log):
            if file is not None:
                file.sync()
        self._synced_s = time.monotonic()

    def oldest_checkpoint(self) -> int:
        """Return the iteration of the oldest complete checkpoint; 0: there is none."""
        return min((number for number, _ in list_complete(self._run_dir)), default=0)

    def tidy(self, first: int, boundaries: Mapping[int, int], firsts: Mapping[int, int], ahead: int) -> None:
        """Remove finished groups and segments that nothing needs any more.

        A resume begins with the groups that were under way after a checkpoint, or after the last iteration.

        Args:
            first: wave that has groups under way after that iteration.
            boundaries: by segment, the last iteration whose groups it leaves to the segments before.
            firsts: by checkpoint, the first wave that had groups under way.
            ahead: how many waves may be under way besides it.
        """
        self.write()
        kept = [number for number, _ in list_complete(self._run_dir)] or [0]
        begins = max((number for number, after in boundaries.items() if after <= min(kept)), default=0)
        needed = {firsts.get(number, number + 1) + more for number in kept for more in range(ahead + 1)}
        for number in [n for n in self._groups if n < first and (n not in needed or n not in self._held)]:
            self._forget(number)
        old = [path for n, path in groups_files(self._run_dir).items() if n < first and n not in needed]
        # The oldest first: whoever is killed meanwhile leaves no gap, which would be taken for a loss.
        log_files = segments(self._run_dir)
        old += [path for number, path in log_files.items() if number < begins]
        self._note_size({number: path for number, path in list(log_files.items())[:-1] if number >= begins}, min(kept))
        for text in remove_each(old, self._check):
            log.warning("ledger: not removed", what=text)
        self._remove_steps(max(kept))
        if max(kept) >= self._lost_step:
            self._lost_step, self._failed = 0, None

    def _note_size(self, sealed: Mapping[int, Path], oldest: int) -> None:
        """Remark that the log is large, once: it is not shortened, or a resume from that checkpoint would lack it."""
        self._sealed = {number: self._sealed.get(number) or path.stat().st_size for number, path in sealed.items()}
        size, was_large = sum(self._sealed.values()), self._is_large
        self._is_large = size > self._max_bytes
        if self._is_large and not was_large:
            self.remarks.append(
                f"the log since iteration {oldest}, that of the oldest checkpoint, has {size // _MIB} MiB, more than "
                f"run.ledger_max_mib ({self._max_bytes // _MIB}): remove that checkpoint if you do not need it"
            )

    def close(self) -> None:
        """Write what waits, as far as possible, and close the files."""
        with contextlib.suppress(OSError):
            self.sync()
        for file in (*self._groups.values(), *([self._log] if self._log is not None else [])):
            file.close()
        self._groups.clear()

    def _flush(self) -> None:
        if self._waiting and self._log is not None:
            self._log.append(b"".join(self._waiting))
            self._waiting.clear()
