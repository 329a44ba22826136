"""Hugging Face folders: read a rank's slices from safetensors, gather the policy, write a folder."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from servicekit.errors import ConfigError
from tandem_files.atomic import make_way, replace_folder
from tandem_files.exports import copy_companions, settle
from tandem_files.model.safetensors_header import TRAINABLE
from weightsync.families.decoder import EMBEDDING, LM_HEAD
from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.config import UntiedHead
from weightsync.model.megatron_names import in_local_spelling
from weightsync.model.spec import ModelSpec
from weightsync.plans.messages import Message, cut_messages
from weightsync.plans.plan import TransferPlan, make_plan
from weightsync.transfer.coverage import Coverage
from weightsync.transfer.transports.packing import Packer

GATHER_ELEMENTS = 2**24


def load_shards(
    folder: Path | str, spec: ModelSpec, layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fill one rank's parameters from a Hugging Face folder, reading only its own slices.

    Args:
        layout: where the rank keeps its slices (megatron_layout or sglang_layout).
        tensors: the rank's parameters by engine name, Megatron's in either spelling; written in place, cast to their
            dtype.
    Raises: ConfigError: a tensor is missing, has another shape or type, is cut off or not finite; a tied model's file
        has another output layer; the parameters do not fit the layout.
    """
    tensors = in_local_spelling(spec, tensors)
    coverage = Coverage(layout, rank, f"rank {rank}")
    coverage.check(tensors)
    plan = make_plan(hf_layout(spec), layout)
    with ExitStack() as stack:
        reader = CheckpointReader(Path(folder), stack)
        for op in plan.ops[plan.ops["dst"] == rank]:
            _fill(reader, spec, plan, op, tensors[layout.params[op["dst_param"]]].detach())
    coverage.zero_padding(tensors)


def stream_shards(
    folder: Path, spec: ModelSpec, layout: Layout, rank: int, names: Iterable[str], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Make parameters of a rank from a Hugging Face folder, one after the other; padding of the vocabulary is zero.

    Args:
        names: of the parameters, as the layout has them.
    Yields: name and parameter, which the generator does not keep.
    Raises: ConfigError: as load_shards.
    """
    plan, places = make_plan(hf_layout(spec), layout.only(rank)), {name: i for i, name in enumerate(layout.params)}
    shapes = layout.parameters_of(rank)
    with ExitStack() as stack:
        reader = CheckpointReader(folder, stack)
        for name in names:
            target = torch.zeros(shapes[name], dtype=dtype)
            for op in plan.ops[(plan.ops["dst"] == rank) & (plan.ops["dst_param"] == places[name])]:
                _fill(reader, spec, plan, op, target)
            yield name, target
            del target


def _fill(reader: "CheckpointReader", spec: ModelSpec, plan: TransferPlan, op: np.void, target: torch.Tensor) -> None:
    """Write the block of an op into the parameter that it belongs to."""
    canonical = plan.source.tensors[op["tensor"]]
    rows = slice(int(op["src_row"]), int(op["src_row"] + op["rows"]))
    cols = slice(int(op["src_col"]), int(op["src_col"] + op["cols"]))
    shape = tuple(plan.source.param_shapes[op["src_param"]])
    block = reader.read(canonical, shape, rows, cols)
    if spec.tied and canonical == EMBEDDING and LM_HEAD in reader:
        _check_tied(block, reader.read(LM_HEAD, shape, rows, cols), target.dtype)
    # a stack of experts' matrices is one tall matrix
    matrix = target.view(-1, 1) if target.dim() == 1 else target.view(-1, target.shape[-1])
    row, col = int(op["dst_row"]), int(op["dst_col"])
    matrix[row : row + block.shape[0], col : col + block.shape[1]].copy_(block)


def _check_tied(embedding: torch.Tensor, head: torch.Tensor, dtype: torch.dtype) -> None:
    if not torch.equal(embedding.to(dtype), head.to(dtype)):
        raise UntiedHead


class CheckpointReader:
    """A reader of slices of the tensors of a safetensors checkpoint, in one file or several."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._files: dict[str, tuple[Path, Any]] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{folder} has no *.safetensors file")
        for path in paths:
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), (path, file)))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...], rows: slice, cols: slice) -> torch.Tensor:
        """Read a block [rows, cols] of a tensor; a vector has one column. Raises: ConfigError, naming the tensor."""
        if name not in self._files:
            raise ConfigError(f"{self._folder} has no tensor {name}")
        path, file = self._files[name]
        stored = file.get_slice(name)
        dtype = stored.get_dtype()
        if dtype not in TRAINABLE:
            raise ConfigError(
                f"{name} in {path} is of type {dtype}: quantized weights cannot be trained; use {TRAINABLE}"
            )
        if tuple(stored.get_shape()) != shape:
            raise ConfigError(
                f"{name} in {self._folder} has shape {stored.get_shape()}, config.json says {list(shape)}"
            )
        block: torch.Tensor = stored[rows].view(-1, 1) if len(shape) == 1 else stored[rows, cols]
        # A sum costs a tenth of a check of each element, and is finite only if they all are (an overflow aside).
        if not block.sum(dtype=torch.float32).isfinite() and not block.isfinite().all():
            count = int((~block.isfinite()).sum())
            raise ConfigError(f"{name} in {path} has {count} values that are not finite; the file is damaged")
        return block


def gather_tensors(
    spec: ModelSpec, parallel: Parallel, rank: int, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor] | None:
    """Gather the unfused Hugging Face tensors on trainer rank 0's CPU. Every rank of the trainer calls it.

    Args:
        group: of all ranks, over gloo: rank 0 takes the others' tensors one after the other, for as long as it needs.
    Returns: tensors by canonical name on rank 0, None elsewhere.
    """
    source = megatron_layout(spec, parallel)
    plan = make_plan(source, hf_layout(spec))
    sender = Packer(source, in_local_spelling(spec, tensors), "src")
    whole: dict[str, torch.Tensor] = {}
    if rank == 0:
        whole = {
            name: torch.empty(shape, dtype=sender.dtype)
            for name, shape in zip(plan.target.params, plan.target.param_shapes, strict=True)
        }
    for message in cut_messages(plan, GATHER_ELEMENTS):
        if rank in (message.src, 0):
            _gather_one(message, rank, sender, Packer(plan.target, whole, "dst") if rank == 0 else None, group)
    return whole if rank == 0 else None


def _gather_one(
    message: Message, rank: int, sender: Packer, receiver: Packer | None, group: dist.ProcessGroup | None
) -> None:
    on_device = sender.device if rank == message.src else torch.device("cpu")
    payload = torch.empty(sender.payload_bytes(message), dtype=torch.uint8, device=on_device)
    if rank == message.src:
        sender.pack(message, payload)
    payload = payload.cpu()
    if message.src != 0:
        if rank == message.src:
            dist.send(payload, 0, group=group)
        else:
            dist.recv(payload, message.src, group=group)
    if receiver is not None:
        receiver.unpack(message, payload)


def write_folder(
    tensors: Mapping[str, torch.Tensor],
    model: Path | str,
    out: Path | str,
    *,
    tokenizer: Path | None = None,
    num_bytes: Mapping[str, int] | None = None,
    about: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> int:
    """Write a Hugging Face folder: the tensors, and what belongs to them of the model. It appears when complete.

    Args:
        tensors: by canonical name; each is read once or twice, and a file's tensors are in memory together (5 GB).
        model: folder of the model that the tensors were trained from.
        tokenizer: folder of the tokenizer; None: the model's.
        num_bytes: of each tensor; None: the tensors are in memory.
        about: JSON values for the export's mark.
        template: the chat template, in place of all of the tokenizer's; None: the tokenizer's.
    Returns: bytes of the tensors.
    Raises: OSError, SafetensorError: it cannot be written; ConfigError: the model's folder is not complete.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    make_way(partial)
    partial.mkdir()
    try:
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        copy_companions(Path(model), tokenizer, partial, dtype, about or {}, template)
        written = _save_tensors(
            tensors, num_bytes or {name: tensor.nbytes for name, tensor in tensors.items()}, partial
        )
        settle(partial)
        replace_folder(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _save_tensors(tensors: Mapping[str, torch.Tensor], num_bytes: Mapping[str, int], folder: Path) -> int:
    split = split_state_dict_into_shards_factory(
        dict(num_bytes), get_storage_size=lambda size: size, filename_pattern="model{suffix}.safetensors"
    )
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name].contiguous() for name in names}, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return sum(num_bytes.values())
