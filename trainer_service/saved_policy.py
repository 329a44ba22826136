"""Reads the policy of a trainer checkpoint without the trainer: Hugging Face tensors, from the shards of all ranks."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from servicekit.errors import ConfigError
from trainer_service.identity import differences
from trainer_service.shard_files import WEIGHTS, file_of, read_meta
from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.megatron_names import in_local_spelling
from weightsync.model.spec import ModelSpec
from weightsync.plans.plan import make_plan


class SavedPolicy(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint by canonical name; a tensor is read when it is asked for.

    Args:
        folder: the trainer's part of a checkpoint, whose digests were compared.
        spec: sizes of the run's model.
        stack: closes the files.
    Raises: ConfigError: the folder is no checkpoint, or one of another model.
    """

    def __init__(self, folder: Path, spec: ModelSpec, stack: ExitStack) -> None:
        meta = read_meta(folder)
        different = differences(meta, {"model": json.loads(spec.fingerprint())})
        if different:
            raise ConfigError(f"{folder} is of another model than model.path: {'; '.join(different)}")
        self.policy_version = int(meta["policy_version"])
        self._folder, self._spec, self._stack = folder, spec, stack
        self._parallel = Parallel(**meta["parallel"])
        self._dtype: torch.dtype = getattr(torch, meta["dtype"])
        self._plan = make_plan(megatron_layout(spec, self._parallel), hf_layout(spec))
        self._places = {name: place for place, name in enumerate(self._plan.target.params)}
        # By parameter of the target, so that those of one tensor are beside each other.
        self._ops = self._plan.ops[np.argsort(self._plan.ops["dst_param"], kind="stable")]
        self._files: dict[str, Mapping[str, Any]] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._places)

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of every tensor."""
        shapes = zip(self._plan.target.params, self._plan.target.param_shapes, strict=True)
        return {name: math.prod(shape) * self._dtype.itemsize for name, shape in shapes}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor. Raises: ConfigError: a shard lacks a part of it, or cannot be read."""
        place = self._places[name]
        whole = torch.empty(self._plan.target.param_shapes[place], dtype=self._dtype)
        matrix = whole.view(-1, 1) if whole.dim() == 1 else whole
        first, end = np.searchsorted(self._ops["dst_param"], [place, place + 1])
        for op in self._ops[first:end]:
            rows, cols = int(op["rows"]), int(op["cols"])
            row, col = int(op["dst_row"]), int(op["dst_col"])
            matrix[row : row + rows, col : col + cols] = self._block(op, rows, cols)
        return whole

    def _block(self, op: np.void, rows: int, cols: int) -> torch.Tensor:
        """Read the block of an op from the shard of its source rank."""
        parameter, row, col = self._plan.source.params[op["src_param"]], int(op["src_row"]), int(op["src_col"])
        file = file_of(parameter, int(op["src"]), self._parallel)
        stored = self._open(file).get(parameter)
        shape = self._plan.source.param_shapes[op["src_param"]]
        if stored is None or tuple(stored.get_shape()) != shape:
            found = "lacks" if stored is None else f"has with shape {stored.get_shape()}"
            raise ConfigError(f"{self._folder / file} {found} {parameter} of shape {list(shape)}")
        block: torch.Tensor = (
            stored[row : row + rows] if len(shape) == 1 else stored[row : row + rows, col : col + cols]
        )
        return block.view(rows, cols)

    def _open(self, file: str) -> Mapping[str, Any]:
        """Return a shard's parameters, by their names in the layout, as slices that can be read."""
        if file not in self._files:
            try:
                held = self._stack.enter_context(safe_open(str(self._folder / file), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{self._folder / file} cannot be read: {error}") from None
            stored = {name.removeprefix(WEIGHTS): name for name in set(held.keys()) if name.startswith(WEIGHTS)}
            slices = {name: held.get_slice(key) for name, key in stored.items()}
            self._files[file] = in_local_spelling(self._spec, slices)
        return self._files[file]
