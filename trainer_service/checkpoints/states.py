"""Fills the tensors of a rank from a checkpoint of any layout: the planner's fourth use.

A source of the plan is a shard of the checkpoint, in the layout of the trainer that wrote it; its target is this rank.
AdamW's moments and masters have their parameter's shape, so that one plan moves them all. A rank that holds a part of
them only (ZeRO-1) reads the rows of that part.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from servicekit.errors import ConfigError
from trainer_service.checkpoints.parts import FlatPart, Held, shapes_of, values_of
from trainer_service.checkpoints.shards import SavedShards
from weightsync.layouts.layout import Layout
from weightsync.model.megatron_names import in_local_spelling
from weightsync.model.spec import ModelSpec
from weightsync.transfer.coverage import Coverage
from weightsync.transfer.transports.packing import as_matrix


class SavedStates:
    """What one rank reads from a checkpoint: of every tensor exactly the blocks that it holds.

    Args:
        shards: the checkpoint.
        spec: the model.
        layout: where the run's ranks hold their parameters (megatron_layout).
        tensors: the rank's tensors by "kind/parameter", in either spelling. A kind holds a tensor of each parameter's
            shape, or a part of it, or a number for each.
    Raises: ConfigError: a shard lacks a tensor or has another shape or type; the rank's tensors do not fit `layout`.
    """

    def __init__(
        self, shards: SavedShards, spec: ModelSpec, layout: Layout, rank: int, tensors: Mapping[str, Held]
    ) -> None:
        self._shards, self._layout, self._rank = shards, layout, rank
        self._shaped, self._numbers = _by_kind(spec, tensors)
        for kind, held in self._shaped.items():
            Coverage(layout, rank, f"{kind} of rank {rank}").check(shapes_of(held))
        # At the same layout every rank reads its own file again.
        self._ops = shards.plan_to(layout.only(rank), near=rank).ops
        for kind, held in self._shaped.items():
            dtype = values_of(next(iter(held.values()))).dtype
            for op in self._ops:
                shards.check(kind, op, dtype)
        self._places = {name: place for place, name in enumerate(layout.params)}
        self._found = {kind: self._numbers_of(kind) for kind in self._numbers}

    def num_bytes(self) -> int:
        """Return the bytes that `fill` reads, numbers aside."""
        elements = int((self._ops["rows"] * self._ops["cols"]).sum())
        return sum(_bytes_of(held, elements) for held in self._shaped.values())

    def numbers(self) -> list[tuple[Tensor, float]]:
        """Return the tensors of one number each (AdamW's step counts), and what `fill` writes to them."""
        return [
            (values_of(tensor), self._found[kind][name])
            for kind, held in self._numbers.items()
            for name, tensor in held.items()
        ]

    def fill(self) -> None:
        """Write the rank's tensors; padding of the vocabulary becomes zero."""
        with torch.no_grad():
            for kind, held in self._shaped.items():
                whole = {name: value for name, value in held.items() if isinstance(value, Tensor)}
                self._fill_whole(kind, whole)
                if whole:
                    Coverage(self._layout, self._rank, kind).zero_padding(whole)
                self._fill_parts(kind, {name: value for name, value in held.items() if isinstance(value, FlatPart)})
            for tensor, number in self.numbers():
                tensor.fill_(number)

    def _fill_whole(self, kind: str, whole: Mapping[str, Tensor]) -> None:
        matrices = {name: as_matrix(name, tensor) for name, tensor in whole.items()}
        for op in self._ops:
            matrix = matrices.get(self._layout.params[op["dst_param"]])
            if matrix is not None:
                row, col = int(op["dst_row"]), int(op["dst_col"])
                rows, cols = slice(row, row + int(op["rows"])), slice(col, col + int(op["cols"]))
                matrix[rows, cols].copy_(self._shards.block(kind, op))

    def _fill_parts(self, kind: str, parts: Mapping[str, FlatPart]) -> None:
        """Read the rows of each part, one parameter at a time; rows of padding have no source and are zero."""
        ops = self._ops[np.argsort(self._ops["dst_param"], kind="stable")]
        for name, part in parts.items():
            first, last = part.rows
            rows = torch.zeros(last - first, part.columns, dtype=part.values.dtype)
            begin, end = np.searchsorted(ops["dst_param"], [self._places[name], self._places[name] + 1])
            for op in ops[begin:end]:
                row, col = int(op["dst_row"]), int(op["dst_col"])
                low, high = max(row, first), min(row + int(op["rows"]), last)
                if low < high:
                    within = op.copy()
                    within["src_row"] += low - row
                    within["rows"] = high - low
                    rows[low - first : high - first, col : col + int(op["cols"])] = self._shards.block(kind, within)
            part.take(rows)

    def _numbers_of(self, kind: str) -> dict[str, float]:
        """Read a kind's number of each of this rank's parameters, which all sources of a parameter must share."""
        found: dict[str, float] = {}
        seen: set[tuple[int, int, int]] = set()
        for op in self._ops:
            source = (int(op["src"]), int(op["src_param"]), int(op["dst_param"]))
            if source in seen:
                continue
            seen.add(source)
            name = self._layout.params[op["dst_param"]]
            number = float(self._shards.stored(kind, op)[...])
            if found.setdefault(name, number) != number:
                raise ConfigError(
                    f"{self._shards.folder}: {kind} of {name} is {found[name]:g} in one shard, {number:g} in another: "
                    "its files are of different steps; restore the folder from a copy, or choose another checkpoint"
                )
        # A parameter that is all padding has no source; its number counts for nothing that is trained.
        other = next(iter(found.values()), 0.0)
        return {name: found.get(name, other) for name in self._numbers[kind]}


def _bytes_of(held: Mapping[str, Held], elements: int) -> int:
    """Return the bytes of a kind. elements: of a rank that has whole tensors."""
    parts = [value.values for value in held.values() if isinstance(value, FlatPart)]
    return sum(part.nbytes for part in parts) or elements * values_of(next(iter(held.values()))).itemsize


def _by_kind(
    spec: ModelSpec, tensors: Mapping[str, Held]
) -> tuple[dict[str, Mapping[str, Held]], dict[str, Mapping[str, Held]]]:
    """Split tensors by kind, parameters in the local spelling. Returns: kinds with the parameters' shapes; numbers."""
    kinds: dict[str, dict[str, Held]] = {}
    for key, tensor in tensors.items():
        kind, _, parameter = key.partition("/")
        kinds.setdefault(kind, {})[parameter] = tensor
    renamed = {kind: in_local_spelling(spec, held) for kind, held in kinds.items()}
    numbers = {kind: held for kind, held in renamed.items() if all(len(value.shape) == 0 for value in held.values())}
    return {kind: held for kind, held in renamed.items() if kind not in numbers}, numbers
