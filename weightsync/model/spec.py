"""The sizes of a model, from which the shapes of its parameters follow."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from weightsync.families import FAMILIES
from weightsync.families.rule import Rule
from weightsync.model.config import UnsupportedModel, check_computation, entries, is_whole, positive, whole
from weightsync.model.rope import RopeScaling, read_rope

# Larger than in any model; loops over layers, heads and experts stay short.
_MOST_LAYERS, _MOST_HEADS, _MOST_EXPERTS = 2**14, 2**14, 2**16


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of a decoder, from its Hugging Face config.json.

    Attributes:
        head_dim: need not be hidden_size / num_heads (Qwen3-0.6B: 128, not 64).
        num_experts: 0 for a dense model.
        dense_layers: layers of a mixture of experts that have no experts.
        norm_topk_prob: the weights of a token's chosen experts are normalised to sum 1.
        max_positions: tokens of the longest sequence, which a rotary scaling multiplies.
        rope_factor: stretch of the low frequencies by Llama 3's rope scaling; 1.0 is no scaling.
        rope_scaling: any other rotary scaling.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    dense_layers: tuple[int, ...] = ()
    norm_topk_prob: bool = False
    rope_factor: float = 1.0
    rope_scaling: RopeScaling | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Read a config.json.

        Raises: ConfigError: a size is missing or invalid; UnsupportedModel: the model_type is not supported, or the
            engines cannot compute the model.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"config.json holds a {type(config).__name__}, not a table")
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise UnsupportedModel(
                f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}",
                ", ".join(known.models for known in FAMILIES.values()),
            )
        try:
            return cls._from_supported(family, config)
        except KeyError as missing:
            raise ConfigError(f"config.json of this {family} model has no {missing}") from None

    @classmethod
    def _from_supported(cls, family: str, config: Mapping[str, Any]) -> "ModelSpec":
        known = FAMILIES[family]
        rope_theta, rope_factor, scaling = read_rope(config)
        stated = whole(config, "max_position_embeddings")
        max_positions = stated if scaling is None else max(stated, scaling.longest)
        check_computation(config, known, longest=max_positions)
        heads, hidden = whole(config, "num_attention_heads", most=_MOST_HEADS), whole(config, "hidden_size")
        kv_heads = heads if config.get("num_key_value_heads") is None else whole(config, "num_key_value_heads")
        if heads % kv_heads != 0:
            raise ConfigError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        return cls(
            family=family,
            num_layers=whole(config, "num_hidden_layers", most=_MOST_LAYERS),
            hidden_size=hidden,
            ffn_size=whole(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(config, hidden, heads),
            vocab_size=whole(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=known.qkv_bias,
            qk_norm=known.qk_norm,
            norm_eps=positive(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            max_positions=max_positions,
            rope_factor=rope_factor,
            rope_scaling=scaling,
            **(_experts(config) if known.experts else {}),
        )

    @classmethod
    def from_folder(cls, folder: Path | str) -> "ModelSpec":
        """Read `folder`/config.json. Raises: ConfigError: it is missing, not JSON, or not supported."""
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; give a Hugging Face model folder") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from None
        return cls.from_config(config)

    def rules(self) -> tuple[Rule, ...]:
        """Return the mapping rules that apply to this model, in canonical order.

        Raises: ConfigError: two of them have the same tensor or parameter.
        """
        flags = {"always": True, "untied": not self.tied, "qkv_bias": self.qkv_bias, "qk_norm": self.qk_norm}
        rules = tuple(rule for rule in FAMILIES[self.family].rules if flags[rule.when])
        for side, names in (
            ("canonical tensor", [part.name for rule in rules for part in rule.parts]),
            ("Megatron parameter", [name for rule in rules for name in rule.megatron]),
            ("SGLang parameter", [rule.sglang for rule in rules]),
        ):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            if twice:
                raise ConfigError(f"two mapping rules of {self.family} have the {side} {twice[0]}")
        return rules

    def size(self, symbol: str) -> int:
        """Return the size for a symbol of the mapping rules, e.g. "hidden" or "q"."""
        sizes = {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "expert_ffn": self.expert_ffn_size,
            "experts": self.num_experts,
            "vocab": self.vocab_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "one": 1,
        }
        return sizes[symbol]

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def num_elements(self) -> int:
        """Number of parameters, without norms and biases."""
        return sum(self.matrix_elements(stage, self.num_experts) for stage in ("first", "layer", "last"))

    def matrix_elements(self, stage: str, experts: int) -> int:
        """Count the elements of a stage's matrices, with so many experts in each layer that has some."""
        sparse = 0 if self.num_experts == 0 else self.num_layers - len(self.dense_layers)
        layers = {"all": self.num_layers, "experts": sparse, "dense": self.num_layers - sparse}
        return sum(
            self.size(part.rows) * self.size(part.cols)
            * (layers[rule.layers] if stage == "layer" else 1) * (experts if rule.per_expert else 1)
            for rule in self.rules() if rule.stage == stage
            for part in rule.parts if part.cols != "one"
        )  # fmt: skip

    def fingerprint(self) -> str:
        """Return a canonical text of all fields that are set; models with equal texts have equal layouts."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, sort_keys=True)

    def differences(self, other: "ModelSpec") -> list[str]:
        """List what keeps one model's weights from being computed as another's, e.g. `hidden_size: 64, not 128`.

        Longer sequences with the same frequencies are computed alike.
        """
        own, others = asdict(self), asdict(other)
        names = [name for name in own if name != "max_positions" and own[name] != others[name]]
        return [f"{name}: {own[name]}, not {others[name]}" for name in names]


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = whole(config, "head_dim")
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise ConfigError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if head_dim % 2 != 0:
        raise ConfigError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one")
    return head_dim


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the experts' sizes; every decoder_sparse_step-th layer has experts unless mlp_only_layers lists it."""
    step = whole(config, "decoder_sparse_step", default=1)
    listed = [layer for layer in entries(config, "mlp_only_layers") if is_whole(layer)]
    layers = range(whole(config, "num_hidden_layers", most=_MOST_LAYERS))
    # transformers 5 writes num_local_experts
    experts = whole(config, "num_experts" if "num_experts" in config else "num_local_experts", most=_MOST_EXPERTS)
    chosen = whole(config, "num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {chosen} is more than the {experts} experts")
    norm_topk_prob = bool(config.get("norm_topk_prob", False))
    if chosen == 1 and norm_topk_prob:
        raise UnsupportedModel(
            "num_experts_per_tok 1 with norm_topk_prob: true is not supported (the one expert's weight is always 1, so "
            "the router gets no gradient)",
            "use a model that chooses several experts, or does not normalise",
        )
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_ffn_size": whole(config, "moe_intermediate_size"),
        "dense_layers": tuple(i for i in layers if i in listed or (i + 1) % step != 0),
        "norm_topk_prob": norm_topk_prob,
    }


# Sizes of published models by name, as far as `tandem plan` needs them.
PRESETS = {name: config for family in FAMILIES.values() for name, config in family.presets.items()}


def preset(name: str) -> ModelSpec:
    """Return the sizes of a published model. Raises: KeyError: the name is unknown."""
    return ModelSpec.from_config(PRESETS[name])
