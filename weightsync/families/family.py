"""The form of a model family: what is true of a model_type and not written in its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weightsync.families.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: all of it is data. docs/adding-a-model.md says where a computation of its own goes.

    Attributes:
        model_type: its name in config.json.
        models: names of its models, for people.
        rules: its parameters, and where each engine keeps them.
        qkv_bias: query, key and value projections have biases.
        qk_norm: queries and keys are normalised.
        experts: layers have a mixture of experts.
        windows: layers that have sliding windows where config.json turns them on: "listed" are those of `layer_types`,
            else those from `max_window_layers` on.
        presets: sizes of published models by name, as in their config.json.
    """

    model_type: str
    models: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    windows: Literal["none", "all", "listed"] = "listed"
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
