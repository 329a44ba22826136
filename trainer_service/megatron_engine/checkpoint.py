"""Checkpoints of the trainer: a safetensors file per model shard and a meta.json, put in place by one rename.

Layout of a folder:
    meta.json                        format, policy_version, model, parallel sizes, dtype
    shard-tp00-pp00.safetensors      weights/NAME, main/NAME (bfloat16 only), exp_avg/NAME, exp_avg_sq/NAME, step/NAME,
                                     rng/cpu, rng/device (CUDA only), rng/tracker/NAME
Data-parallel ranks hold equal state: the first of each model shard writes, all read.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from servicekit.errors import ConfigError
from trainer_service.megatron_engine.agree import together

FORMAT = 1
META = "meta.json"


def shard_name() -> str:
    """File name of this rank's model shard."""
    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return f"shard-tp{tensor:02d}-pp{pipeline:02d}.safetensors"


def save(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: torch.device) -> int:
    """Every rank calls this together; the folder appears, or is replaced, when all shards are on disk.

    Args:
        meta: what the folder must agree with to be loaded, and policy_version.
    Returns: bytes of all shards, on every rank.
    Raises: Internal: on every rank, if any of them could not write.
    """
    what = f"write checkpoint {folder}"
    partial = folder.with_name(f".{folder.name}.partial")
    leads, writes = dist.get_rank() == 0, parallel_state.get_data_parallel_rank() == 0
    together(what, device, (lambda: _prepare(partial)) if leads else None)
    size = together(what, device, (lambda: _write_shard(partial / shard_name(), tensors)) if writes else None)
    together(what, device, (lambda: _publish(partial, folder, meta)) if leads else None)
    return size


def _prepare(partial: Path) -> int:
    """An empty folder; what a crashed save left there is removed."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return 0


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> int:
    save_file({name: t.detach().cpu().contiguous() for name, t in (dict(tensors) | _rng_state()).items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


def _publish(partial: Path, folder: Path, meta: Mapping[str, Any]) -> int:
    with (partial / META).open("w", encoding="utf-8") as file:
        json.dump(dict(meta) | {"format": FORMAT}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    # a rename does not replace a folder that has files in it
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return 0


def read_meta(folder: Path) -> dict[str, Any]:
    """Raises: ConfigError: the folder is no checkpoint of this format."""
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a trainer checkpoint: it has no {META}") from None
    if meta.get("format") != FORMAT:
        raise ConfigError(f"{folder} has checkpoint format {meta.get('format')!r}; this trainer reads {FORMAT}")
    return meta


def load(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
    """Fill this rank's tensors and random states.

    Args:
        meta: what the checkpoint must agree with, key by key.
    Returns: the checkpoint's policy version.
    Raises: ConfigError: another model, layout or dtype, or a shard that lacks tensors.
    """
    saved = read_meta(folder)
    for key, value in meta.items():
        if saved.get(key) != value:
            raise ConfigError(f"checkpoint {folder} is of another {key}: it has {saved.get(key)}, the run has {value}")
    path = folder / shard_name()
    if not path.is_file():
        raise ConfigError(f"checkpoint {folder} has no {path.name}")
    with safe_open(path, framework="pt") as file, torch.no_grad():
        held = set(file.keys())
        missing = sorted(set(tensors) - held)
        if missing:
            raise ConfigError(f"{path} lacks {len(missing)} tensors, {missing[0]} first")
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))
        _restore_rng({name: file.get_tensor(name) for name in held if name.startswith("rng/")})
    return int(saved["policy_version"])


def _rng_state() -> dict[str, Tensor]:
    out = {f"rng/tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    out["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        out["rng/device"] = torch.cuda.get_rng_state()
    return out


def _restore_rng(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["rng/cpu"])
    if torch.cuda.is_available() and "rng/device" in states:
        torch.cuda.set_rng_state(states["rng/device"])
    prefix = "rng/tracker/"
    tracked = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(tracked)
