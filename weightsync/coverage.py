"""The coverage gate: the layout against the engine's own parameters. Bytes never asked for are never checked."""

from collections.abc import Mapping

import torch

from servicekit.errors import ConfigError
from weightsync.layout import Layout


def check_coverage(layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor], slot: str) -> None:
    """Raises: ConfigError: a parameter that no rule covers, a rule without its parameter, or a shape that differs."""
    expected = layout.parameters_of(rank)
    uncovered = sorted(set(tensors) - set(expected))
    unused = sorted(set(expected) - set(tensors))
    if uncovered or unused:
        raise ConfigError(
            f"{slot}: the mapping rules do not fit this engine: "
            f"no rule for {uncovered[:5]}, no parameter for {unused[:5]}"
        )
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:
        raise ConfigError(f"{slot}: parameters of several types: {sorted(map(str, dtypes))}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(
                f"{slot}: {name} has shape {tuple(tensors[name].shape)} in the engine, {shape} in the layout"
            )


def zero_padding(layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Zero-fills rows beyond the true vocabulary: padding never travels, and each side fills its own."""
    mine = layout.shards[layout.shards["rank"] == rank]
    for param in layout.rank_params[layout.rank_params[:, 0] == rank, 1]:
        pieces = mine[mine["param"] == param]
        rows = layout.param_shapes[param][0]
        filled = int((pieces["param_row"] + pieces["rows"]).max()) if len(pieces) > 0 else 0
        if filled < rows:
            tensors[layout.params[param]].detach()[filled:].zero_()
