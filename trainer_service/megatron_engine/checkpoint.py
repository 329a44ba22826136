"""Checkpoints of the trainer: safetensors files of model shards and a meta.json, published by one rename.

trainer_service/shard_files.py says what is in which file. Of ranks with equal state, the first one writes, and all
read. A rank compares files with their digests before it changes anything.
"""

import json
import os
import shutil
from collections.abc import Mapping
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

from servicekit.errors import ConfigError, Internal
from tandem_files.atomic import replace_folder, write_json_atomic
from tandem_files.checkpoints import DamagedCheckpoint
from tandem_files.digests import MANIFEST, damages, file_digest, read_manifest, write_manifest
from trainer_service.identity import differences
from trainer_service.megatron_engine.agree import any_rank, together
from trainer_service.shard_files import EXPERTS, FORMAT, META, experts_file, read_meta, shard_file

_NOTE = ".digest"


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
        name=shard_file(parallel_state.get_tensor_model_parallel_rank(), pipeline),
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
        meta: entries that must be equal when the folder is loaded, and policy_version and steps_done.
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
        together(what, device, (lambda: _prepare(partial)) if leads else None)
        size = together(what, device, lambda: sum(_write(partial / file.name, file.tensors) for file in mine))
        together(what, device, (lambda: _publish(partial, folder, meta)) if leads else None)
    except Internal:
        if leads:  # a partial checkpoint is useless, and may have filled the disk
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return size


def _prepare(partial: Path) -> int:
    """Make an empty folder; files that a crashed save left there are removed."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return 0


def _write(path: Path, tensors: Mapping[str, Tensor]) -> int:
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
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


def check(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Check what load() checks before it changes anything; arguments, result and errors are those of load()."""
    files = _files(tensors)
    damage = "; ".join(_damages(folder, [META, *(file.name for file in files)]))
    if any_rank(damage != "", device):
        why = damage or "another trainer rank found damage; its log says it"
        raise DamagedCheckpoint(f"checkpoint {folder}: {why}")
    saved = read_meta(folder)
    different = differences(saved, meta)
    if different:
        raise ConfigError(f"checkpoint {folder} is of another run than this: {'; '.join(different)}")
    for file in files:
        _check_file(folder / file.name, file.tensors)
    return saved


def load(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Fill this rank's tensors and random states; every rank must call this.

    Args:
        meta: entries that the checkpoint must have.
    Returns: the checkpoint's own meta.
    Raises, on every rank alike and with nothing changed:
        ConfigError: another model, layout or dtype, or a shard that lacks tensors; all that differs is named.
        DamagedCheckpoint: a rank's files are not what was written.
    """
    saved = check(folder, tensors, meta, device)
    for file in _files(tensors):
        states = _read(folder / file.name, file.tensors)
        if states:
            _restore_rng(states, device)
    return saved


def _damages(folder: Path, names: list[str]) -> list[str]:
    if not folder.is_dir():
        return ["there is no such folder"]
    try:
        digests = read_manifest(folder)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    unknown = [f"{name} is not in {MANIFEST}" for name in names if name not in digests and (folder / name).exists()]
    return unknown + damages(folder, {name: digests[name] for name in names if name in digests})


def _check_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    if not path.is_file():
        raise ConfigError(f"checkpoint {path.parent} has no {path.name}")
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in set(file.keys())}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    missing = sorted(set(tensors) - set(shapes))
    if missing:
        raise ConfigError(f"{path} lacks {len(missing)} tensors, {missing[0]} first")
    for name, tensor in tensors.items():
        if shapes[name] != tuple(tensor.shape):
            raise ConfigError(f"{path}: {name} has shape {shapes[name]}, the run's has {tuple(tensor.shape)}")


def _read(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fill the tensors from a file. Returns: the file's random states."""
    with safe_open(path, framework="pt") as file, torch.no_grad():
        held = set(file.keys())
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))
        return {name: file.get_tensor(name) for name in held if name.startswith("rng/")}


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    out = {f"rng/tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    out["rng/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        out["rng/device"] = torch.cuda.get_rng_state(device)
    return out


def _restore_rng(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["rng/cpu"])
    if device.type == "cuda" and "rng/device" in states:
        torch.cuda.set_rng_state(states["rng/device"], device)
    prefix = "rng/tracker/"
    tracked = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(tracked)
