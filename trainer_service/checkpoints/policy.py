"""Reads the policy of a trainer checkpoint without the trainer: Hugging Face tensors, from the shards of all ranks."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from servicekit.errors import ConfigError
from trainer_service.checkpoints.files import WEIGHTS
from trainer_service.checkpoints.shards import SavedShards
from weightsync.layouts.hf import hf_layout
from weightsync.model.spec import ModelSpec


class SavedPolicy(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint by canonical name; a tensor is read when it is asked for.

    Args:
        folder: the trainer's part of a checkpoint, whose digests were compared.
        spec: sizes of the run's model.
        stack: closes the files.
        dtype: to which each tensor is cast, as torch rounds; None: the checkpoint's.
    Raises: ConfigError: the folder is no checkpoint, or one of another model.
    """

    def __init__(self, folder: Path, spec: ModelSpec, stack: ExitStack, dtype: torch.dtype | None = None) -> None:
        self._shards = SavedShards(folder, spec, stack)
        self.policy_version = int(self._shards.meta["policy_version"])
        self._stored: torch.dtype = getattr(torch, self._shards.meta["dtype"])
        self._dtype = self._stored if dtype is None else dtype
        self._plan = self._shards.plan_to(hf_layout(spec))
        self._places = {name: place for place, name in enumerate(self._plan.target.params)}
        # By parameter of the target, so that those of one tensor are next to each other.
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
        """Read a tensor.

        Raises: ConfigError: a shard lacks a part of it, or cannot be read; a number of it is too large for the type.
        """
        place = self._places[name]
        whole = torch.empty(self._plan.target.param_shapes[place], dtype=self._stored)
        matrix = whole.view(-1, 1) if whole.dim() == 1 else whole
        first, end = np.searchsorted(self._ops["dst_param"], [place, place + 1])
        for op in self._ops[first:end]:
            self._shards.check(WEIGHTS, op, self._stored)
            rows, cols = int(op["rows"]), int(op["cols"])
            row, col = int(op["dst_row"]), int(op["dst_col"])
            matrix[row : row + rows, col : col + cols] = self._shards.block(WEIGHTS, op)
        return self._cast(name, whole)

    def _cast(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Cast a tensor to the type asked for. Raises: ConfigError: a finite number would become infinite."""
        cast = whole.to(self._dtype)
        if cast.dtype != whole.dtype and bool((cast.isinf() & whole.isfinite()).any()):
            text, most = str(self._dtype).removeprefix("torch."), torch.finfo(self._dtype).max
            raise ConfigError(
                f"{name} has {float(whole[whole.isfinite()].abs().max()):g}, which is more than {text} holds "
                f"({most:g}): choose another type with --dtype"
            )
        return cast
