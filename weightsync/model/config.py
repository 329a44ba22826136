"""Reads the entries of a config.json, and refuses those that the engines do not compute as transformers does.

Transformers 5 defines what a config.json means. An entry that Megatron or SGLang ignores would make another model of
it. So it is refused here, where check, planner, trainer and rollouts all read a model.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from servicekit.errors import ConfigError
from weightsync.families.family import Family

# Larger than in any model, and small enough that the product of two does not overflow.
_LARGEST = 2**30
_SLIDING = "sliding_attention"
# Qwen's own defaults (transformers' Qwen2Config)
_WINDOW, _FIRST_SLIDING_LAYER = 4096, 28


class UnsupportedModel(ConfigError):
    """A valid config.json of a model that cannot be trained; `problem` and `advice` are the halves of the message."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"config.json: {problem}; {advice}")
        self.problem, self.advice = problem, advice


class UntiedHead(UnsupportedModel):
    """A tied model whose file has another output layer: transformers would use it, SGLang would not."""

    def __init__(self) -> None:
        super().__init__(
            "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight",
            "set it to false, or remove the tensor from the file",
        )


def whole(
    config: Mapping[str, Any], key: str, *, least: int = 1, most: int = _LARGEST, default: int | None = None
) -> int:
    """Read a whole number. Raises: KeyError: it is missing without a default; ConfigError: it is not such a number."""
    value = config[key] if default is None else config.get(key, default)
    if not is_whole(value) or not least <= value <= most:
        raise ConfigError(f"config.json: {key} is {_short(value)}, not a whole number from {least} to {most}")
    return int(value)


def _short(value: Any) -> str:
    # Python refuses to format a number of thousands of digits.
    if is_whole(value) and abs(value) > 10**40:
        return "a number of more than 40 digits"
    return repr(value)[:80]


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def entries(config: Mapping[str, Any], key: str) -> list[Any]:
    """Read a list; a missing or null one is empty. Raises: ConfigError: it is something else."""
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"config.json: {key} is {_short(value)}, not a list")
    return value or []


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """Read a positive number. Raises: ConfigError: it is not above 0, or not finite."""
    value = config.get(key)
    number = default if value is None else math.nan
    if is_whole(value):
        number = float(min(value, _LARGEST**2))  # a larger one has no float
    elif isinstance(value, float):
        number = value
    if not 0 < number < math.inf:
        raise ConfigError(f"config.json: {key} is {_short(value)}, not a number above 0")
    return number


def check_computation(config: Mapping[str, Any], family: Family, *, longest: int) -> None:
    """Check the entries that change the computation, except rotary embeddings and experts.

    Args:
        longest: tokens of the longest sequence.
    Raises: UnsupportedModel: with the entry and its value.
    """
    _check_quantization(config.get("quantization_config"))
    _check_activation(config.get("hidden_act", "silu"))
    for switch in ("attention_bias", "mlp_bias"):
        if not family.qkv_bias and config.get(switch):
            raise UnsupportedModel(
                f"{switch}: true is not supported in a {family.model_type} model (output layers have biases, too)",
                "use a model without these biases",
            )
    _check_windows(config, family, longest)


def _check_quantization(settings: Any) -> None:
    if not settings:
        return
    kind = settings.get("quant_method") if isinstance(settings, Mapping) else None
    raise UnsupportedModel(
        f"quantization_config says that the weights are quantized ({kind or settings})",
        "use the model's unquantized checkpoint (bfloat16, float16 or float32)",
    )


def _check_activation(name: Any) -> None:
    if name == "silu":
        return
    same = name == "swish"
    raise UnsupportedModel(
        f"hidden_act {name!r} is not supported, only 'silu' is",
        "write 'silu', which is the same function" if same else "use a model whose MLPs are SwiGLU",
    )


def _check_windows(config: Mapping[str, Any], family: Family, longest: int) -> None:
    """Refuse sliding windows, as transformers finds them, unless every sequence fits into the window."""
    types = entries(config, "layer_types")
    listed = [layer for layer, kind in enumerate(types) if kind == _SLIDING]
    other = sorted({str(kind) for kind in types} - {_SLIDING, "full_attention"})
    if other:
        raise UnsupportedModel(f"layer_types has {other[0]!r}", "use a model whose layers all have full attention")
    if not config.get("use_sliding_window"):
        if listed:
            raise UnsupportedModel(
                f"layer_types says that layer {listed[0]} has {_SLIDING}, but use_sliding_window is not true",
                "write full_attention, or use a model without sliding windows",
            )
        return
    if "sliding_window" in config and config["sliding_window"] is None:
        return
    window = whole(config, "sliding_window", default=_WINDOW)
    if window >= longest:
        return
    if sliding := _sliding_layers(config, family, listed):
        raise UnsupportedModel(
            f"use_sliding_window: true is not supported (sliding_window {window}, from layer {sliding[0]} on)",
            "use a model whose layers all have full attention; sequences that the window holds train the same with "
            "use_sliding_window: false",
        )


def _sliding_layers(config: Mapping[str, Any], family: Family, listed: list[int]) -> list[int]:
    layers = range(min(whole(config, "num_hidden_layers"), 2**14))
    if family.windows == "none":
        return []
    if family.windows == "all":
        return list(layers)
    if config.get("layer_types"):
        return listed
    first = whole(config, "max_window_layers", least=0, default=_FIRST_SLIDING_LAYER)
    return [layer for layer in layers if layer >= first]
