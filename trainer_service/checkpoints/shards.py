"""The shards of a trainer checkpoint: any block of any parameter of any rank, and of any kind of state."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from servicekit.errors import ConfigError
from trainer_service.checkpoints.files import check_mark, file_of, parallel_of, read_meta
from trainer_service.identity import differences
from weightsync.layouts.layout import Layout
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.megatron_names import in_local_spelling
from weightsync.model.spec import ModelSpec
from weightsync.plans.offers import one_copy
from weightsync.plans.plan import TransferPlan, make_plan

# Types as safetensors spells them.
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SavedShards:
    """The tensors of a checkpoint by kind ("weights", "exp_avg", ...), in the layout of the trainer that wrote it.

    Files are mapped, so that only the blocks that are asked for are read from the disk.

    Args:
        folder: the trainer's part of a checkpoint, whose digests were compared.
        spec: sizes of the run's model.
        stack: closes the files.
    Raises: ConfigError: the folder is no checkpoint, or one of another model.
    """

    def __init__(self, folder: Path, spec: ModelSpec, stack: ExitStack) -> None:
        self.folder, self.meta = folder, read_meta(folder)
        different = differences(self.meta, {"model": json.loads(spec.fingerprint())})
        if different:
            raise ConfigError(f"{folder} is of another model than model.path: {'; '.join(different)}")
        self.parallel = parallel_of(folder, self.meta)
        self.layout = megatron_layout(spec, self.parallel)
        self._spec, self._stack = spec, stack
        self._files: dict[str, dict[str, Mapping[str, Any]]] = {}

    def plan_to(self, target: Layout, near: int = 0) -> TransferPlan:
        """Plan the reading of a target.

        Args:
            near: rank whose files are read where several have the same.
        """
        return make_plan(one_copy(self.layout, near), target)

    def stored(self, kind: str, op: np.void) -> Any:
        """Return the slice of safetensors with the whole tensor that an op reads from.

        Raises: ConfigError: its file cannot be read, is of another checkpoint, or lacks the tensor.
        """
        parameter = self.layout.params[op["src_param"]]
        path = self._path(op)
        stored = self._open(path.name).get(kind, {}).get(parameter)
        if stored is None:
            raise ConfigError(f"{path} lacks {kind}/{parameter}")
        return stored

    def check(self, kind: str, op: np.void, dtype: torch.dtype) -> None:
        """Check the tensor that an op reads from. Raises: ConfigError: it is missing, or has another shape or type."""
        stored, shape = self.stored(kind, op), self.layout.param_shapes[op["src_param"]]
        found, asked = (stored.get_dtype(), *stored.get_shape()), (_DTYPES.get(dtype, str(dtype)), *shape)
        if found != asked:
            name = f"{kind}/{self.layout.params[op['src_param']]}"
            raise ConfigError(f"{self._path(op)} has {name} as {_text(found)}, this run needs {_text(asked)}")

    def block(self, kind: str, op: np.void) -> torch.Tensor:
        """Return the block [rows, cols] of an op, which is a view of the file."""
        stored, rows, cols = self.stored(kind, op), int(op["rows"]), int(op["cols"])
        row, col = int(op["src_row"]), int(op["src_col"])
        if len(self.layout.param_shapes[op["src_param"]]) == 1:
            block: torch.Tensor = stored[row : row + rows]
        else:
            block = stored[row : row + rows, col : col + cols]
        return block.view(rows, cols)

    def _path(self, op: np.void) -> Path:
        """Return the file that an op reads."""
        return self.folder / file_of(self.layout.params[op["src_param"]], int(op["src"]), self.parallel)

    def _open(self, file: str) -> dict[str, Mapping[str, Any]]:
        """Return a file's tensors by kind and by parameter, as slices that can be read."""
        if file not in self._files:
            try:
                held = self._stack.enter_context(safe_open(str(self.folder / file), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{self.folder / file} cannot be read: {error}") from None
            check_mark(self.folder / file, held.metadata() or {}, self.meta)
            kinds: dict[str, dict[str, Any]] = {}
            for key in held.keys():  # noqa: SIM118 - it is not a dict
                kind, _, parameter = key.partition("/")
                kinds.setdefault(kind, {})[parameter] = held.get_slice(key)
            self._files[file] = {kind: in_local_spelling(self._spec, slices) for kind, slices in kinds.items()}
        return self._files[file]


def _text(form: tuple[Any, ...]) -> str:
    """Return a type and shape as text."""
    return f"{form[0]} {list(form[1:])}"
