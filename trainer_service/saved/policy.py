"""Reads the policy of a trainer checkpoint without the trainer: Hugging Face tensors, from the shards of all ranks."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from trainer_service.saved.files import WEIGHTS
from trainer_service.saved.shards import SavedShards
from weightsync.layouts.hf import hf_layout
from weightsync.model.spec import ModelSpec


class SavedPolicy(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint by canonical name; a tensor is read when it is asked for.

    Args:
        folder: the trainer's part of a checkpoint, whose digests were compared.
        spec: sizes of the run's model.
        stack: closes the files.
    Raises: ConfigError: the folder is no checkpoint, or one of another model.
    """

    def __init__(self, folder: Path, spec: ModelSpec, stack: ExitStack) -> None:
        self._shards = SavedShards(folder, spec, stack)
        self.policy_version = int(self._shards.meta["policy_version"])
        self._dtype: torch.dtype = getattr(torch, self._shards.meta["dtype"])
        self._plan = self._shards.plan_to(hf_layout(spec))
        self._places = {name: place for place, name in enumerate(self._plan.target.params)}
        # By parameter of the target, so that those of one tensor are beside each other.
        self._ops = self._plan.ops[np.argsort(self._plan.ops["dst_param"], kind="stable")]

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
            self._shards.check(WEIGHTS, op, self._dtype)
            rows, cols = int(op["rows"]), int(op["cols"])
            row, col = int(op["dst_row"]), int(op["dst_col"])
            matrix[row : row + rows, col : col + cols] = self._shards.block(WEIGHTS, op)
        return whole
