"""Writes a Hugging Face folder as a trainer checkpoint at a layout, one tensor in memory at a time. No Megatron."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem_files.atomic import check_room
from trainer_service.checkpoints.files import EXTRA, OPTIMIZER, WEIGHTS, file_of
from trainer_service.checkpoints.writing import discard, leave_digest, partial_of, publish
from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import ModelSpec
from weightsync.transfer.hf_files import stream_shards
from weightsync.transfer.tensors import tensor_checksums

# Types as safetensors spells them.
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_NO_DIGEST = "0" * 32


def import_policy(model: Path, spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, out: Path) -> int:
    """Write a policy as the checkpoint of a trainer that has done no step; AdamW's state is not in it.

    Args:
        model: the Hugging Face folder, of which each block is read once for each file that has it.
        out: the checkpoint's folder; it appears, or is replaced, when it is complete.
    Returns: its bytes.
    Raises: ConfigError: the folder's tensors do not fit; OSError: `out` cannot be written.
    """
    layout, partial = megatron_layout(spec, parallel), partial_of(out)
    files = _files(layout, parallel)
    shapes = dict(zip(layout.params, layout.param_shapes, strict=True))
    num_elements = sum(math.prod(shapes[name]) for _, names in files.values() for name in names)
    discard(partial)
    check_room(out, num_elements * dtype.itemsize)
    partial.mkdir(parents=True)
    try:
        for file, (rank, names) in files.items():
            tensors = stream_shards(model, spec, layout, rank, names, dtype)
            write_stream(partial / file, {name: shapes[name] for name in names}, dtype, tensors)
            leave_digest(partial / file)
        meta: dict[str, Any] = {"model": json.loads(spec.fingerprint()), "dtype": str(dtype).removeprefix("torch.")}
        meta |= {"parallel": parallel.sizes(), "policy_version": 0, OPTIMIZER: False, EXTRA: False}
        return publish(partial, out, meta)
    finally:
        discard(partial)


def _files(layout: Layout, parallel: Parallel) -> dict[str, tuple[int, list[str]]]:
    """Return the first rank that has the parameters of each file, and their names."""
    files: dict[str, tuple[int, list[str]]] = {}
    for rank in range(parallel.world_size):
        for name in layout.parameters_of(rank):
            first, names = files.setdefault(file_of(name, rank, parallel), (rank, []))
            if first == rank:
                names.append(name)
    return files


def write_stream(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a safetensors file of weights, tensor by tensor, which the library's own writer needs all together.

    Its metadata has the digest of each; digests have one length, so the header is written first and again at the end.

    Args:
        tensors: name and value, in the order of `shapes`.
    """
    with path.open("wb") as file:
        file.write(_header(shapes, dtype, {}))
        digests: dict[str, str] = {}
        for name, tensor in tensors:
            file.write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
            digests |= tensor_checksums({name: tensor})
            del tensor
        file.seek(0)
        file.write(_header(shapes, dtype, digests))


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, digests: Mapping[str, str]) -> bytes:
    """Return a safetensors header: 8 bytes with its length, JSON, padding to 8 bytes."""
    entries: dict[str, dict[str, Any]] = {}
    metadata: dict[str, str] = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * dtype.itemsize
        entries[f"{WEIGHTS}/{name}"] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        sizes = "x".join(map(str, shape))
        metadata[f"{WEIGHTS}/{name}"] = digests.get(name, f"{str(dtype).removeprefix('torch.')}:{sizes}:{_NO_DIGEST}")
        begin = end
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
