"""Checkpoints of the trainer: safetensors files of model shards and a meta.json, published by one rename.

trainer_service/saved/files.py says what is in which file. Of ranks with equal state, the first one writes, and all
read. The reading trainer may have any other layout: a rank reads the blocks that it holds, from whichever files have
them (trainer_service/saved/states.py). All files are compared with their digests before any rank changes anything.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from servicekit.errors import ConfigError, Internal, TandemError
from servicekit.logs import get_logger
from tandem_files.atomic import replace_folder, write_json_atomic
from tandem_files.checkpoints import DamagedCheckpoint
from tandem_files.digests import MANIFEST, damages, file_digest, read_manifest, write_manifest
from tandem_files.room import check_room
from trainer_service.identity import differences
from trainer_service.megatron_engine.agree import first_text, together
from trainer_service.saved.files import (
    EXPERTS,
    FORMAT,
    META,
    experts_file,
    has_optimizer,
    parallel_of,
    read_meta,
    shard_file,
)
from trainer_service.saved.shards import SavedShards
from trainer_service.saved.states import SavedStates
from weightsync.layouts.layout import Layout, Parallel
from weightsync.model.spec import ModelSpec
from weightsync.transfer.tensors import tensor_checksums

_NOTE = ".digest"

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class _File:
    """The tensors of this rank that belong to one file, and whether this rank writes it."""

    name: str
    tensors: dict[str, Tensor]
    writes: bool


def _files(tensors: Mapping[str, Tensor]) -> list[_File]:
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    experts = {name: tensor for name, tensor in tensors.items() if EXPERTS in name}
    shard = _File(
        name=_own_shard(),
        tensors={name: tensor for name, tensor in tensors.items() if name not in experts},
        writes=parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
    )
    if not experts:
        return [shard]
    tensor, expert = (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    own = _File(
        name=experts_file(tensor, expert, pipeline),
        tensors=experts,
        writes=parallel_state.get_expert_data_parallel_rank() == 0,
    )
    return [shard, own]


def save(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: torch.device) -> int:
    """Save a checkpoint; every rank must call this. The folder appears, or is replaced, when all shards are on disk.

    Args:
        meta: entries that must be equal when the folder is loaded, parallel sizes, policy_version and steps_done.
    Returns: bytes of all shards, on every rank.
    Raises: Internal: on every rank, if any of them could not write.
    """
    what = f"write checkpoint {folder}"
    partial = folder.with_name(f".{folder.name}.partial")
    leads = dist.get_rank() == 0
    shard, *experts = _files(tensors)
    mine = [file for file in experts if file.writes]
    if shard.writes:
        mine.append(replace(shard, tensors=shard.tensors | _rng_state(device)))
    try:
        needed = together(what, device, lambda: sum(t.nbytes for file in mine for t in file.tensors.values()))
        together(what, device, (lambda: _prepare(partial, needed)) if leads else None)
        size = together(what, device, lambda: sum(_write(partial / file.name, file.tensors) for file in mine))
        together(what, device, (lambda: _publish(partial, folder, meta)) if leads else None)
    except Internal:
        if leads:  # a partial checkpoint is useless, and may have filled the disk
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return size


def _prepare(partial: Path, needed: int) -> int:
    """Make an empty folder for `needed` bytes; files that a crashed save left there are removed."""
    shutil.rmtree(partial, ignore_errors=True)
    check_room(partial.parent, needed)
    partial.mkdir(parents=True)
    return 0


def _write(path: Path, tensors: Mapping[str, Tensor]) -> int:
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(held, path, metadata=tensor_checksums(held))  # by which a damaged tensor is found
    with path.open("rb") as file:
        os.fsync(file.fileno())
    digest = file_digest(path)
    _note_of(path).write_text(json.dumps(digest), encoding="utf-8")
    return int(digest["bytes"])


def _note_of(path: Path) -> Path:
    """Return the path at which a rank leaves a file's digest for rank 0, which writes the manifest."""
    return path.with_name(f"{path.name}{_NOTE}")


def _publish(partial: Path, folder: Path, meta: Mapping[str, Any]) -> int:
    write_json_atomic(partial / META, dict(meta) | {"format": FORMAT})
    digests = {META: file_digest(partial / META)}
    for note in sorted(partial.glob(f"*{_NOTE}")):
        digests[note.name.removesuffix(_NOTE)] = json.loads(note.read_text(encoding="utf-8"))
        note.unlink()
    write_manifest(partial, digests)
    replace_folder(partial, folder)
    return 0


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The rank that reads a checkpoint, and the run that it must be of.

    Attributes:
        layout: megatron_layout of `spec` and `parallel`.
        meta: entries that the checkpoint's meta.json must have.
    """

    spec: ModelSpec
    parallel: Parallel
    layout: Layout
    rank: int
    meta: Mapping[str, Any]
    device: torch.device

    def check(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Check what load() checks before it changes anything; arguments and errors are those of load()."""
        with ExitStack() as stack:
            self._find(folder, tensors, stack)

    def load(self, folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill this rank's tensors and random states; every rank must call this.

        The trainer that wrote the checkpoint may have had other parallel sizes. Random states are those of a rank of
        the same place: with other sizes they stay as they are.

        Returns: the checkpoint's own meta.
        Raises, on every rank alike, with the first rank's finding and with nothing changed:
            ConfigError: another model or dtype, or a shard that lacks tensors; all that differs is named.
            DamagedCheckpoint: a file is not what was written.
        """
        with ExitStack() as stack:
            states = self._find(folder, tensors, stack)
            states.fill()
        saved = read_meta(folder)
        if not has_optimizer(saved):
            log.warning("checkpoint without optimizer: AdamW starts anew", folder=str(folder))
        if parallel_of(folder, saved) == self.parallel:
            _restore_rng(folder / _own_shard(), self.device)
        else:
            log.info("checkpoint of another layout read", folder=str(folder), bytes=states.num_bytes())
        return saved

    def _find(self, folder: Path, tensors: Mapping[str, Tensor], stack: ExitStack) -> SavedStates:
        """Look for all that this rank reads; each file is compared with its digest by one rank."""
        damage = first_text("; ".join(_damages(folder, self.rank)), self.device)
        if damage:
            raise DamagedCheckpoint(
                f"checkpoint {folder}: {damage}: restore the file from a copy, or choose another checkpoint"
            )
        states, complaint = None, ""
        try:
            meta = read_meta(folder)
            different = differences(meta, self.meta)
            if different:
                raise ConfigError(f"checkpoint {folder} is of another run than this: {'; '.join(different)}")
            states = SavedStates(SavedShards(folder, self.spec, stack), self.spec, self.layout, self.rank, tensors)
        except (TandemError, SafetensorError, OSError) as error:  # no other rank may wait for this one
            complaint = str(error)
        complaint = first_text(complaint, self.device)
        if complaint or states is None:
            raise ConfigError(complaint)
        return states


def _damages(folder: Path, rank: int) -> list[str]:
    """Compare this rank's share of the files with their digests: each file is read by one rank."""
    if not folder.is_dir():
        return ["there is no such folder"]
    try:
        digests = read_manifest(folder)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    unknown = [path.name for path in sorted(folder.glob("*.safetensors")) if path.name not in digests]
    mine = sorted(digests)[rank :: dist.get_world_size()]
    return [f"{name} is not in {MANIFEST}" for name in unknown] + damages(
        folder, {name: digests[name] for name in mine}
    )


def _own_shard() -> str:
    """Return the file of this rank's parameters that are not experts'."""
    return shard_file(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    )


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    out = {f"rng/tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    out["rng/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        out["rng/device"] = torch.cuda.get_rng_state(device)
    return out


def _restore_rng(path: Path, device: torch.device) -> None:
    with safe_open(path, framework="pt") as file:
        states = {name: file.get_tensor(name) for name in set(file.keys()) if name.startswith("rng/")}
    torch.set_rng_state(states["rng/cpu"])
    if device.type == "cuda" and "rng/device" in states:
        torch.cuda.set_rng_state(states["rng/device"], device)
    prefix = "rng/tracker/"
    tracked = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(tracked)
