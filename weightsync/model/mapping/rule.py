"""The form of a mapping rule: one parameter and its three homes (Hugging Face, Megatron, SGLang)."""

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
    """One parameter of the model.

    `parts` are fused in this order in both engines. `{layer}` and `{expert}` in a name are global numbers, except in
    `megatron`, where pipeline stages number their own layers, and expert-parallel ranks their own experts, from 0.
    `megatron` lists the spellings: mcore's local spec first, TransformerEngine's fused one after it. A rule of an
    expert (`{expert}` in its parts) names a stacked parameter in `sglang`: [experts of the rank, rows, columns].
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
