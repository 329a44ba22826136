"""Reads the rotary embeddings of a config.json as transformers 5 does.

Where SGLang 0.5.23 computes a scaling otherwise, the entry is refused. There is one exception: `dynamic` is computed as
SGLang does (docs/numerics.md, Models).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servicekit.errors import ConfigError
from weightsync.model.config import UnsupportedModel, is_whole, positive, whole

_DEFAULT_THETA = 10000.0
# built into megatron-core
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
_LARGEST_FACTOR = 1024  # larger than in any model
_ORIGINAL = "original_max_position_embeddings"
_GENERAL = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"))
# By type, the keys that transformers and SGLang both apply, besides _GENERAL.
_KEYS = {
    "linear": frozenset[str](),
    "dynamic": frozenset[str](),
    "yarn": frozenset((_ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Linear, dynamic or YaRN scaling of rotary embeddings; the names are those of config.json.

    Attributes:
        kind: "linear", "dynamic" or "yarn".
        factor: of the length; at least 1.
        original: longest sequence before scaling, in tokens.
        mscale: of YaRN's factor on queries and keys, 0.1 * mscale * ln(factor) + 1; None: 1.
        mscale_all_dim: the same of its divisor; None: it is not divided.
        truncate: YaRN rounds the bounds of its ramp to whole dimensions.
    """

    kind: str
    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def longest(self) -> int:
        """The longest sequence that the scaling is for, in tokens."""
        return int(self.factor * self.original)

    def dynamic_theta(self, theta: float, head_dim: int) -> float:
        """Compute the base of `dynamic` for the longest sequence, which SGLang uses for sequences of every length."""
        return theta * math.pow(self.factor * self.factor - (self.factor - 1), head_dim / (head_dim - 2))


def read_rope(config: Mapping[str, Any]) -> tuple[float, float, RopeScaling | None]:
    """Read the base (theta), the factor of Llama 3's scaling, and any other scaling.

    If there is a rope_scaling, it replaces rope_parameters as a whole. `rope_type` has precedence over the older
    `type`, and its rope_theta over the top-level one, whose default is 10000.

    Returns: base, factor (1.0 is no Llama 3 scaling) and scaling.
    Raises: UnsupportedModel: an unknown scaling or one with further keys; two bases that differ; parameters by layer
        type.
    """
    entries = {name: _entry(config, name) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if entries["rope_scaling"] else "rope_parameters"
    factor, scaling = _scaling(config, name, entries[name])
    for holder in (config, *entries.values()):
        if holder.get("partial_rotary_factor") not in (None, 1):
            raise UnsupportedModel(
                f"partial_rotary_factor {holder['partial_rotary_factor']} is not supported (SGLang applies it in "
                "some models, transformers does not)",
                "use a model that rotates whole heads",
            )
    return _theta(config, name, entries), factor, scaling


def _entry(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    entry = config.get(name) or {}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"config.json: {name} is {entry!r}, not a table")
    # transformers accepts a layer type as a key only if layer_types lists it, and fails otherwise
    nested = [key for key, value in entry.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModel(
            f"{name} has an entry of its own for {nested[0]!r} layers",
            "write the entries of all layers (rope_type, rope_theta) into it directly",
        )
    return entry


def _theta(config: Mapping[str, Any], name: str, entries: dict[str, Mapping[str, Any]]) -> float:
    holders = {f"{entry}.rope_theta": holder for entry, holder in entries.items()} | {"rope_theta": config}
    stated = {where: positive(holder, "rope_theta", 0) for where, holder in holders.items() if _states_theta(holder)}
    theta = stated.get(f"{name}.rope_theta", stated.get("rope_theta", _DEFAULT_THETA))
    if any(value != theta for value in stated.values()):
        listed = ", ".join(f"{where} {value:.10g}" for where, value in stated.items())
        problem = f"{listed} differ" if len(stated) > 1 else f"{listed} is ignored: {name} replaces it and has none"
        raise UnsupportedModel(problem, "state the base that the model was trained with, once")
    return theta


def _states_theta(holder: Mapping[str, Any]) -> bool:
    return holder.get("rope_theta") is not None


def _scaling(config: Mapping[str, Any], name: str, rope: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1.0, None
    if kind == "llama3":
        return _llama3_factor(config, name, rope), None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedModel(
            f"{name} asks for rotary embeddings of type {kind!r}, which are not supported; llama3, yarn, linear and "
            "dynamic ones are",
            "remove the entry if the model was not trained with it, or use another model",
        )
    unknown = [key for key, value in rope.items() if key not in _GENERAL | _KEYS[kind] and value is not None]
    if unknown:
        raise UnsupportedModel(
            f"{name} of type {kind} has {unknown[0]}, which transformers and SGLang do not both apply",
            "remove it if the model computes the same without it"
            + (" (YaRN's attention_factor is then 0.1 ln(factor) + 1)" if kind == "yarn" else ""),
        )
    factor, longest = _stretch(name, kind, rope), whole(config, "max_position_embeddings")
    if kind != "yarn":
        return 1.0, RopeScaling(kind=kind, factor=factor, original=longest)
    original = whole({_ORIGINAL: _original(config, name, rope)}, _ORIGINAL)
    return 1.0, RopeScaling(kind=kind, factor=factor, original=original, **_yarn(name, rope))


def _stretch(name: str, kind: str, rope: Mapping[str, Any]) -> float:
    if "factor" not in rope:
        raise UnsupportedModel(f"{name} of type {kind} has no factor", "state by how much it stretches the length")
    factor = positive(rope, "factor", 0)
    if not 1 <= factor <= _LARGEST_FACTOR:
        raise UnsupportedModel(
            f"{name} of type {kind} has factor {factor:g}", f"it must be from 1 to {_LARGEST_FACTOR}"
        )
    if kind == "linear" and is_whole(rope["factor"]):
        raise UnsupportedModel(
            f"{name} of type linear has the whole number {factor:g} as factor, which SGLang cannot read",
            f"write {factor:.1f}",
        )
    return factor


def _yarn(name: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    # null is no default in SGLang, except of mscale and mscale_all_dim
    betas = {key: positive(rope, key, 0) for key in ("beta_fast", "beta_slow") if key in rope}
    scales = {key: positive(rope, key, 0) for key in ("mscale", "mscale_all_dim") if rope.get(key) is not None}
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"config.json: {name}.truncate is {truncate!r}, not true or false")
    return {**betas, **scales, "truncate": truncate}


def _original(config: Mapping[str, Any], name: str, rope: Mapping[str, Any]) -> Any:
    """Find the length before scaling; max_position_embeddings if it is not stated."""
    original = rope.get(_ORIGINAL, whole(config, "max_position_embeddings"))
    if config.get(_ORIGINAL, original) != original:
        raise UnsupportedModel(
            f"{_ORIGINAL} {config[_ORIGINAL]} and {name}.{_ORIGINAL} {original} differ", "state the right one, once"
        )
    return original


def _llama3_factor(config: Mapping[str, Any], name: str, rope: Mapping[str, Any]) -> float:
    constants = {**rope, _ORIGINAL: _original(config, name, rope)}
    for constant, built_in in _LLAMA3.items():
        if constant not in constants:
            raise UnsupportedModel(f"{name} of type llama3 has no {constant}", f"it must be {built_in:g}")
        if positive(constants, constant, built_in) != built_in:
            raise UnsupportedModel(
                f"{name} of type llama3 with {constant} {constants[constant]} is not supported",
                f"only {built_in:g} is",
            )
    if "factor" not in rope:
        raise UnsupportedModel(f"{name} of type llama3 has no factor", "Llama 3.1 has 8.0, Llama 3.2 32.0")
    return positive(rope, "factor", 1.0)
