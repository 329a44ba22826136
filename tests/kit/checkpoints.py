"""A trainer's checkpoint as its ranks write it, without Megatron."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from tandem_files.digests import file_digest, write_manifest
from tests.kit.stores import Tensors, cut
from trainer_service.saved.files import FORMAT, META, WEIGHTS, file_of
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
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    meta = {"format": FORMAT, "policy_version": 3, "steps_done": 3, "model": json.loads(spec.fingerprint())}
    meta |= {"parallel": asdict(parallel), "dtype": str(dtype).removeprefix("torch.")}
    (folder / META).write_text(json.dumps(meta))
    write_manifest(folder, {path.name: file_digest(path) for path in sorted(folder.iterdir())})
    return folder
