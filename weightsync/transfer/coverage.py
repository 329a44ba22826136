"""The coverage check: the layout against the engine's parameters, because bytes outside the plan are never verified."""

from collections.abc import Mapping

import numpy as np
import torch

from servicekit.errors import ConfigError
from weightsync.layouts.layout import Layout


class Coverage:
    """What a layout expects of one rank, computed once."""

    def __init__(self, layout: Layout, rank: int, slot: str) -> None:
        self._slot = slot
        self._expected = layout.parameters_of(rank)
        self._padding = _padding(layout, rank)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ConfigError for a parameter without a rule, a rule without its parameter, or a wrong shape or type."""
        uncovered = sorted(set(tensors) - set(self._expected))
        unused = sorted(set(self._expected) - set(tensors))
        if uncovered or unused:
            raise ConfigError(
                f"{self._slot}: the mapping rules do not fit this engine: "
                f"no rule for {uncovered[:5]}, no parameter for {unused[:5]}"
            )
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1:
            raise ConfigError(f"{self._slot}: parameters of several types: {sorted(map(str, dtypes))}")
        for name, shape in self._expected.items():
            if tuple(tensors[name].shape) != shape:
                raise ConfigError(
                    f"{self._slot}: {name} has shape {tuple(tensors[name].shape)} in the engine, {shape} in the layout"
                )

    def zero_padding(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Zero the rows beyond the true vocabulary: padding never travels, so that each side fills its own."""
        for name, filled in self._padding.items():
            tensors[name].detach()[filled:].zero_()


def _padding(layout: Layout, rank: int) -> dict[str, int]:
    """Return the number of rows that canonical tensors fill, for parameters that have more."""
    mine = layout.shards[layout.shards["rank"] == rank]
    filled = np.zeros(len(layout.params), dtype=np.int64)
    np.maximum.at(filled, mine["param"], mine["param_row"] + mine["rows"])
    held = layout.rank_params[layout.rank_params[:, 0] == rank, 1]
    return {layout.params[p]: int(filled[p]) for p in held if filled[p] < layout.param_shapes[p][0]}
