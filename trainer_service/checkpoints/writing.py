"""Writes the files of a trainer checkpoint, in a thread too: ranks leave notes for rank 0, which publishes the folder.

A rank leaves `NAME.digest` next to a file that is on disk, or `NAME.failed` with the reason. The notes need no
collective: the order of these belongs to the thread that trains. Rank 0 needs no note of its own errors. While it waits
it writes too, because no rank can leave a note where rank 0 cannot.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from servicekit.errors import Internal
from servicekit.logs import get_logger
from tandem_files.atomic import replace_folder, sync_file, write_json_atomic
from tandem_files.digests import file_digest, write_manifest
from trainer_service.checkpoints.files import FORMAT, META
from trainer_service.host_memory import host_like
from weightsync.transfer.tensors import tensor_checksums

_DIGEST, _FAILED = ".digest", ".failed"
# What rank 0 writes to see that it still can.
_PROBE = ".probe"
_POLL_S, _PROBE_S = 0.05, 2.0

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedFile:
    """A file of a checkpoint that this rank writes; `mark` is of the checkpoint (`mark_of`)."""

    name: str
    tensors: Mapping[str, Tensor]
    mark: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class HostCopies:
    """Copies of tensors in host memory, kept from one checkpoint to the next: new memory is slow to touch."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def reserve(self, files: Sequence[SavedFile]) -> int:
        """Have the memory for files, as `take` needs it. Returns: the number of files."""
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        if {name: (t.shape, t.dtype) for name, t in tensors.items()} != self._kept():
            self._copies = {}  # freed first
            self._copies = dict(zip(tensors, host_like(tensors.values()), strict=True))
        return len(files)

    def take(self, files: Sequence[SavedFile], parts: Iterable[tuple[str, Tensor]] = ()) -> list[SavedFile]:
        """Copy the tensors as they are now; copies taken before are overwritten.

        Args:
            files: tensors without memory (device "meta") are among `parts`.
            parts: name and value, one at a time, so that each is freed when it is copied; others are left out.
        """
        self.reserve(files)
        tensors = {name: tensor.detach() for file in files for name, tensor in file.tensors.items()}
        for name, tensor in chain(parts, tensors.items()):
            if name in self._copies and not tensor.is_meta:
                self._copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return [replace(file, tensors={name: self._copies[name] for name in file.tensors}) for file in files]

    def _kept(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (copy.shape, copy.dtype) for name, copy in self._copies.items()}


def write_file(folder: Path, file: SavedFile) -> int:
    """Write a file durably, and its note. Returns: its bytes. Raises: OSError, SafetensorError."""
    path = folder / file.name
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in file.tensors.items()}
    # The checksums, so that a damaged tensor is found.
    save_file(held, path, metadata=tensor_checksums(held) | dict(file.mark))
    return leave_digest(path)


def leave_digest(path: Path) -> int:
    """Force a file to disk, and leave the note that it is there. Returns: its bytes. Raises: OSError."""
    sync_file(path)
    digest = file_digest(path)
    _leave(path, _DIGEST, json.dumps(digest))
    return int(digest["bytes"])


def write_files(folder: Path, files: Sequence[SavedFile]) -> None:
    """Write the files of a rank other than 0, without an error: the note of one that cannot be has the reason."""
    for file in files:
        path = folder / file.name
        try:
            write_file(folder, file)
        except Exception as error:  # noqa: BLE001 - rank 0 must learn of it, whatever it is
            log.error("checkpoint file not written", path=str(path), error=str(error))
            with contextlib.suppress(OSError):  # rank 0 may have removed the folder, because another file failed
                path.unlink(missing_ok=True)  # it fills the disk, and the note needs some of it
                _leave_failure(path, str(error) or type(error).__name__)


def _leave_failure(path: Path, reason: str) -> None:
    """Leave the note that a file was not written; without the reason where there is no room for one."""
    try:
        _leave(path, _FAILED, reason)
    except OSError:
        path.with_name(f"{path.name}{_FAILED}").touch()


def _leave(path: Path, suffix: str, text: str) -> None:
    """Leave a note about a file, which appears whole."""
    note, scratch = path.with_name(f"{path.name}{suffix}"), path.with_name(f".{path.name}{suffix}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(note)


def wait_for_files(folder: Path, count: int, timeout_s: float) -> None:
    """Wait until all ranks have left the notes of `count` files.

    Raises: Internal: a file was not written, or one is missing after `timeout_s`; OSError: nothing can be written there
        any more, as by a rank that has failed.
    """
    now_s = time.monotonic()
    deadline_s, probe_s = now_s + timeout_s, now_s
    while True:
        for note in sorted(folder.glob(f"*{_FAILED}")):
            reason = note.read_text(encoding="utf-8") or "its rank's log has the reason"
            raise Internal(f"{note.name.removesuffix(_FAILED)} was not written: {reason}")
        written = len(list(folder.glob(f"*{_DIGEST}")))
        if written >= count:
            return
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise Internal(f"{count - written} of {count} files were not written within {timeout_s:g} s")
        if now_s >= probe_s:
            _probe(folder)
            probe_s = now_s + _PROBE_S
        time.sleep(_POLL_S)


def _probe(folder: Path) -> None:
    """Write and remove a file. Raises: OSError: the folder cannot be written, or is not there."""
    path = folder / _PROBE
    path.write_text("x", encoding="utf-8")
    path.unlink()


def publish(partial: Path, folder: Path, meta: Mapping[str, Any]) -> int:
    """Add meta.json and the digests of all files, which have notes; then the folder appears. Returns: its bytes."""
    write_json_atomic(partial / META, dict(meta) | {"format": FORMAT})
    digests = {META: file_digest(partial / META)}
    for note in sorted(partial.glob(f"*{_DIGEST}")):
        digests[note.name.removesuffix(_DIGEST)] = json.loads(note.read_text(encoding="utf-8"))
        note.unlink()
    write_manifest(partial, digests)
    replace_folder(partial, folder)
    return sum(int(digest["bytes"]) for digest in digests.values())


def partial_of(folder: Path) -> Path:
    """Return where the files of a checkpoint lie until all are written."""
    return folder.with_name(f".{folder.name}.partial")


def discard(partial: Path) -> None:
    """Remove a checkpoint that was not finished: it is useless, and may have filled the disk."""
    shutil.rmtree(partial, ignore_errors=True)
