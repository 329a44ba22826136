"""Plain tensor stores for tests of weight sync: random canonical tensors, and any rank's parameters cut from them."""

from typing import Any

import numpy as np
import torch

from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Layout
from weightsync.model.spec import ModelSpec

Tensors = dict[str, torch.Tensor]


def tiny_spec(family: str = "qwen3", **changes: object) -> ModelSpec:
    """Make a spec of 4 layers, GQA 4/2, head_dim != hidden / heads, and a vocabulary padded on both sides."""
    config: dict[str, object] = {
        "model_type": family,
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 33,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return ModelSpec.from_config({**config, **changes})


def medium_spec() -> ModelSpec:
    """Make a spec of 50 million parameters: 200 MB in float32, a transfer of about a second."""
    return tiny_spec(
        num_hidden_layers=8,
        hidden_size=640,
        intermediate_size=1920,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=80,
        vocab_size=9000,
    )


def canonical_tensors(spec: ModelSpec, seed: int = 0) -> Tensors:
    """Make every canonical tensor, random float32."""
    layout = hf_layout(spec)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in zip(layout.params, layout.param_shapes, strict=True)
    }


def cut(layout: Layout, rank: int, canonical: Tensors, dtype: torch.dtype = torch.float32) -> Tensors:
    """Cut one rank's parameters; padding is zero."""
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in layout.parameters_of(rank).items()}
    for shard in layout.shards[layout.shards["rank"] == rank]:
        whole = _matrix(canonical[layout.tensors[shard["tensor"]]])
        part = _matrix(tensors[layout.params[shard["param"]]])
        rows, cols = int(shard["rows"]), int(shard["cols"])
        row, col, param_row, param_col = (int(shard[name]) for name in ("row", "col", "param_row", "param_col"))
        part[param_row : param_row + rows, param_col : param_col + cols] = whole[row : row + rows, col : col + cols]
    return tensors


def empty_like_rank(layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Make one rank's parameters, all NaN."""
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in layout.parameters_of(rank).items()}


def same(got: Tensors, expected: Tensors) -> list[str]:
    """Return the names of tensors that are not bitwise equal, or that only one of the two has."""
    both = set(got) & set(expected)
    differ = {name for name in both if not np.array_equal(_bits(got[name]), _bits(expected[name]))}
    return sorted(differ | (set(got) ^ set(expected)))


def _bits(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return the tensor's bytes, in its shape: -0.0 is not 0.0, and a NaN is itself."""
    bits: np.ndarray[Any, Any] = torch.atleast_1d(tensor).contiguous().view(torch.uint8).numpy()
    return bits


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, 1) if tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1])
