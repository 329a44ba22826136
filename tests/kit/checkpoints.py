"""A trainer's checkpoint as its ranks write it, without Megatron: weights only, no optimizer state."""

import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from tandem_files.digests import file_digest, write_manifest
from tests.kit.stores import Tensors, cut
from trainer_service.shard_files import FORMAT, META, WEIGHTS, file_of
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import ModelSpec


def write_trainer_checkpoint(folder: Path, spec: ModelSpec, parallel: Parallel, full: Tensors) -> Path:
    """Write the shards of all ranks and meta.json. Returns: the folder."""
    folder.mkdir(parents=True)
    layout, dtype = megatron_layout(spec, parallel), next(iter(full.values())).dtype
    files: dict[str, Tensors] = {}
    for rank in range(parallel.world_size):
        for name, tensor in cut(layout, rank, full, dtype).items():
            files.setdefault(file_of(name, rank, parallel), {})[f"{WEIGHTS}{name}"] = tensor
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    meta = {"format": FORMAT, "policy_version": 3, "steps_done": 3, "model": json.loads(spec.fingerprint())}
    meta |= {"parallel": asdict(parallel), "dtype": str(dtype).removeprefix("torch.")}
    (folder / META).write_text(json.dumps(meta))
    write_manifest(folder, {path.name: file_digest(path) for path in sorted(folder.iterdir())})
    return folder
