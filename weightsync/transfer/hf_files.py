"""Hugging Face folders: read a rank's slices from safetensors, gather the policy, write a folder."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from servicekit.errors import ConfigError
from tandem_files.atomic import replace_folder
from tandem_files.safetensors_header import TRAINABLE
from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.config import UntiedHead
from weightsync.model.mapping import EMBEDDING, LM_HEAD
from weightsync.model.megatron_names import in_local_spelling
from weightsync.model.spec import ModelSpec
from weightsync.plans.messages import Message, cut_messages
from weightsync.plans.plan import make_plan
from weightsync.transfer.coverage import check_coverage, zero_padding
from weightsync.transfer.transports.packing import Packer

GATHER_ELEMENTS = 2**24
# Says that a folder is ours, and may be replaced by the next export.
EXPORT_MARK = "tandem_export.json"
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


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
    check_coverage(layout, rank, tensors, f"rank {rank}")
    plan = make_plan(hf_layout(spec), layout)
    with ExitStack() as stack:
        reader = CheckpointReader(Path(folder), stack)
        for op in plan.ops[plan.ops["dst"] == rank]:
            name = layout.params[op["dst_param"]]
            canonical = plan.source.tensors[op["tensor"]]
            rows = slice(int(op["src_row"]), int(op["src_row"] + op["rows"]))
            cols = slice(int(op["src_col"]), int(op["src_col"] + op["cols"]))
            shape = tuple(plan.source.param_shapes[op["src_param"]])
            block = reader.read(canonical, shape, rows, cols)
            target = tensors[name].detach()
            if spec.tied and canonical == EMBEDDING and LM_HEAD in reader:
                _check_tied(block, reader.read(LM_HEAD, shape, rows, cols), target.dtype)
            # a stack of experts' matrices is one tall matrix
            matrix = target.view(-1, 1) if target.dim() == 1 else target.view(-1, target.shape[-1])
            row, col = int(op["dst_row"]), int(op["dst_col"])
            matrix[row : row + block.shape[0], col : col + block.shape[1]].copy_(block)
    zero_padding(layout, rank, tensors)


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
    payload = torch.empty(sender.payload_bytes(message), dtype=torch.uint8, device=sender.device)
    if rank == message.src:
        sender.pack(message, payload)
    if message.src != 0:
        if rank == message.src:
            dist.send(payload, 0, group=group)
        else:
            dist.recv(payload, message.src, group=group)
    if receiver is not None:
        receiver.unpack(message, payload.cpu())


def write_folder(tensors: Mapping[str, torch.Tensor], template_folder: Path | str, out: Path | str) -> int:
    """Write a Hugging Face folder: the tensors, and config and tokenizer of the template. It appears when complete.

    Returns: bytes of the tensors.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _copy_template(Path(template_folder), scratch, next(iter(tensors.values())).dtype)
        written = _save_tensors(tensors, scratch)
        scratch.chmod(0o755)
        replace_folder(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return written


def _copy_template(template: Path, scratch: Path, dtype: torch.dtype) -> None:
    for path in template.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, scratch / path.name)
    config = json.loads((scratch / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (scratch / EXPORT_MARK).write_text(json.dumps({"template": str(template)}) + "\n", encoding="utf-8")


def _save_tensors(tensors: Mapping[str, torch.Tensor], scratch: Path) -> int:
    split = split_torch_state_dict_into_shards(dict(tensors))
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name].contiguous() for name in names}, scratch / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
