"""Translates a Megatron trainer's parameter names, which have two spellings, to those of the layouts.

| mcore's local spec                                         | TransformerEngine's modules                             |
|------------------------------------------------------------|---------------------------------------------------------|
| `input_layernorm.weight`                                   | `self_attention.linear_qkv.layer_norm_weight`           |
| `pre_mlp_layernorm.weight` (in both, before experts)       | `mlp.linear_fc1.layer_norm_weight`                      |
| `mlp.experts.local_experts.7.linear_fc1.weight` (and fc2)  | `mlp.experts.linear_fc1.weight7`: of a grouped GEMM     |

The pairs are in the mapping rules (`Rule.megatron`); layouts, plans and checkpoints use the first name.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

from servicekit.errors import ConfigError
from weightsync.model.spec import ModelSpec

Value = TypeVar("Value")


def in_local_spelling(spec: ModelSpec, named: Mapping[str, Value]) -> Mapping[str, Value]:
    """Rename values to mcore's local spelling; other names stay as they are, e.g. those of another engine.

    Raises: ConfigError: a parameter has both of its names.
    """
    renamed = {name: local for name in named if (local := _local_name(spec, name)) is not None}
    if not renamed:
        return named
    for name, local in renamed.items():
        if local in named:
            raise ConfigError(f"{local} and {name} are one parameter, and the trainer has both")
    return {renamed.get(name, name): value for name, value in named.items()}


def _local_name(spec: ModelSpec, name: str) -> str | None:
    """Return the local spelling of a name; None if it is not a second spelling."""
    for pattern, local in _second_spellings(spec):
        if found := pattern.fullmatch(name):
            return found["chunk"] + local.format(**found.groupdict())
    return None


@lru_cache(maxsize=4)
def _second_spellings(spec: ModelSpec) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return every further spelling as a pattern, with the local one."""
    return tuple((_pattern(other), rule.megatron[0]) for rule in spec.rules() for other in rule.megatron[1:])


def _pattern(spelling: str) -> re.Pattern[str]:
    text = re.escape(spelling)
    for number in ("layer", "expert"):
        text = text.replace(re.escape(f"{{{number}}}"), rf"(?P<{number}>\d+)")
    return re.compile(rf"(?P<chunk>(?:chunk\d+\.)?){text}")
