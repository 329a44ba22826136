"""Reads the rotary embeddings of a config.json as transformers 5 does."""

from collections.abc import Mapping
from typing import Any

from servicekit.errors import ConfigError
from weightsync.model.config import UnsupportedModel, positive, whole

_DEFAULT_THETA = 10000.0
# built into megatron-core
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
_ADVICE = (
    "remove the entry if the model was not trained with it (Qwen's cards add YaRN only for prompts beyond the trained "
    "length), or use another model"
)


def read_rope(config: Mapping[str, Any]) -> tuple[float, float]:
    """Read the base (theta) and the factor of Llama 3's scaling.

    If there is a rope_scaling, it replaces rope_parameters as a whole. `rope_type` has precedence over the older
    `type`, and its rope_theta over the top-level one, whose default is 10000.

    Returns: base and factor; a factor of 1.0 is no scaling.
    Raises: UnsupportedModel: another scaling; two bases that differ; parameters by layer type.
    """
    entries = {name: _entry(config, name) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if entries["rope_scaling"] else "rope_parameters"
    factor = _factor(config, name, entries[name])
    for holder in (config, *entries.values()):
        if holder.get("partial_rotary_factor") not in (None, 1):
            raise UnsupportedModel(
                f"partial_rotary_factor {holder['partial_rotary_factor']} is not supported (SGLang applies it in "
                "some models, transformers does not)",
                "use a model that rotates whole heads",
            )
    return _theta(config, name, entries), factor


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


def _factor(config: Mapping[str, Any], name: str, rope: Mapping[str, Any]) -> float:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind != "llama3":
        raise UnsupportedModel(
            f"{name} asks for rotary embeddings of type {kind!r}, which are not supported; llama3 ones are",
            _ADVICE,
        )
    longest, key = whole(config, "max_position_embeddings"), "original_max_position_embeddings"
    original = rope.get(key, longest)
    if config.get(key, original) != original:
        raise UnsupportedModel(f"{key} {config[key]} and {name}.{key} {original} differ", "state the right one, once")
    constants = {**rope, key: original}
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
