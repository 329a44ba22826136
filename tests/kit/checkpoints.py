"""A trainer's checkpoint as its ranks write it, without Megatron."""

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

from tandem_files.digests import file_digest, write_manifest
from tests.kit.stores import Tensors, cut, empty_like_rank
from trainer_service.checkpoints.files import FORMAT, META, WEIGHTS, file_of
from trainer_service.checkpoints.shards import SavedShards
from trainer_service.checkpoints.states import SavedStates
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import ModelSpec


def write_trainer_checkpoint(
    folder: Path, spec: ModelSpec, parallel: Parallel, full: Tensors, step: float | None = None, **moments: Tensors
) -> Path:
    """Write the shards of all ranks and meta.json; the optimizer's state if it is given. Returns: the folder."""
    folder.mkdir(parents=True)
    layout, dtype = megatron_layout(spec, parallel), next(iter(full.values())).dtype
    files: dict[str, Tensors] = {}
    for rank in range(parallel.world_size):
        for kind, canonical in {WEIGHTS: full, **moments}.items():
            held = next(iter(canonical.values())).dtype
            for name, tensor in cut(layout, rank, canonical, held).items():
                file = files.setdefault(file_of(name, rank, parallel), {})
                file[f"{kind}/{name}"] = tensor
                if step is not None:
                    file[f"step/{name}"] = torch.tensor(step)
    for file_name, tensors in files.items():
        save_file(tensors, folder / file_name)
    meta = {"format": FORMAT, "policy_version": 3, "steps_done": 3, "model": json.loads(spec.fingerprint())}
    meta |= {"parallel": parallel.sizes(), "dtype": str(dtype).removeprefix("torch.")}
    (folder / META).write_text(json.dumps(meta))
    write_manifest(folder, {path.name: file_digest(path) for path in sorted(folder.iterdir())})
    return folder


def unread(spec: ModelSpec, parallel: Parallel, rank: int, dtype: torch.dtype) -> Tensors:
    """Make a rank's tensors by kind and name, NaN, with step counts of -1."""
    layout, moments = megatron_layout(spec, parallel), ("exp_avg", "exp_avg_sq")
    kinds = {WEIGHTS: dtype} | dict.fromkeys(moments if dtype == torch.float32 else ("main", *moments), torch.float32)
    held = {kind: empty_like_rank(layout, rank, of_kind) for kind, of_kind in kinds.items()}
    tensors = {f"{kind}/{name}": tensor for kind, named in held.items() for name, tensor in named.items()}
    return tensors | {f"step/{name}": torch.tensor(-1.0) for name in held[WEIGHTS]}


def read_rank(folder: Path, spec: ModelSpec, parallel: Parallel, rank: int, tensors: Tensors) -> Tensors:
    """Fill a rank's tensors from a checkpoint, and return them."""
    with ExitStack() as stack:
        shards = SavedShards(folder, spec, stack)
        SavedStates(shards, spec, megatron_layout(spec, parallel), rank, tensors).fill()
    return tensors
