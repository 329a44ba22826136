"""The form of a mapping rule: one parameter and its names in Hugging Face, Megatron and SGLang."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Placement(Enum):
    """How tensor-parallel ranks share a parameter (rows are dim 0, columns dim 1; a vector has one column)."""

    REPLICATED = "replicated"
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"  # rows, padded so that they divide
    QKV = "qkv"  # Megatron: by query group; SGLang: [q | k | v] shards, KV heads replicated if fewer than ranks
    GATE_UP = "gate_up"  # [gate shard | up shard] on both sides, each by its own number of ranks


@dataclass(frozen=True, kw_only=True)
class CanonicalPart:
    """A canonical tensor: its unfused Hugging Face name and the symbols of its shape (see ModelSpec.size)."""

    name: str
    rows: str
    cols: str = "one"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A parameter of the model.

    `{layer}` and `{expert}` in a name are global numbers, except in `megatron`: there pipeline stages number their own
    layers, and expert-parallel ranks their own experts, from 0.

    Attributes:
        parts: canonical tensors, which both engines fuse in this order.
        megatron: spellings of the name: mcore's local spec, then TransformerEngine's fused one.
        sglang: name; for an expert's rule (`{expert}` in its parts) of the stacked parameter [experts of the rank,
            rows, columns].
    """

    parts: tuple[CanonicalPart, ...]
    megatron: tuple[str, ...]
    sglang: str
    placement: Placement
    stage: Literal["first", "layer", "last"] = "layer"
    when: Literal["always", "untied", "qkv_bias", "qk_norm"] = "always"
    layers: Literal["all", "dense", "experts"] = "all"

    @property
    def per_expert(self) -> bool:
        """Whether there is one such parameter per expert."""
        return "{expert}" in self.parts[0].name
