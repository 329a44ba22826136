"""What weight sync must know of a model: the sizes that its parameters' shapes are made of."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model_type says of its parameters that its config.json does not."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


# By model_type. Its mapping rules are in mapping/__init__.py; docs/adding-a-model.md has the steps.
FAMILIES: dict[str, Family] = {
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "llama": Family(),
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of a decoder, from its Hugging Face config.json.

    `head_dim` is stated, not derived: it need not be hidden_size / num_heads (Qwen3-0.6B: 128, not 64).
    num_experts is 0 for a dense model; dense_layers are a mixture-of-experts model's layers without experts;
    norm_topk_prob: the chosen experts' weights of a token add up to 1. rope_factor: how much Llama 3's rope scaling
    stretches the low frequencies; 1.0 is no scaling.
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Reads a config.json.

        Raises: ConfigError: the model_type is not supported, or a size is missing.
        """
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise ConfigError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
        try:
            return cls._from_supported(family, config)
        except KeyError as missing:
            raise ConfigError(f"config.json of this {family} model has no {missing}") from None

    @classmethod
    def _from_supported(cls, family: str, config: Mapping[str, Any]) -> "ModelSpec":
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        head_dim = config.get("head_dim")
        rope = (config.get("rope_parameters") or {}) | (config.get("rope_scaling") or {})
        for switch in ("attention_bias", "mlp_bias"):
            if not FAMILIES[family].qkv_bias and config.get(switch):
                raise ConfigError(
                    f"a {family} model with {switch}: true is not supported (its output layers have biases too)"
                )
        if config.get("use_sliding_window"):
            raise ConfigError("use_sliding_window: true is not supported")
        return cls(
            family=family,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            ffn_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim) if head_dim is not None else hidden // heads,
            vocab_size=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=FAMILIES[family].qkv_bias,
            qk_norm=FAMILIES[family].qk_norm,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            max_positions=int(config["max_position_embeddings"]),
            rope_factor=_rope_factor(rope),
            **(_experts(config) if FAMILIES[family].experts else {}),
        )

    @classmethod
    def from_folder(cls, folder: Path | str) -> "ModelSpec":
        """Reads `folder`/config.json. Raises: ConfigError: it is missing, no JSON, or not supported."""
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; give a Hugging Face model folder") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from None
        return cls.from_config(config)

    def size(self, symbol: str) -> int:
        """The number behind a symbol of the mapping rules: hidden, q, ... (see the table below)."""
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

    def fingerprint(self) -> str:
        """A canonical text of everything above; equal texts have equal layouts."""
        return json.dumps(asdict(self), sort_keys=True)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer has experts unless it is listed, or is left out by the step (every step-th layer has them)."""
    step = int(config.get("decoder_sparse_step", 1))
    listed = set(config.get("mlp_only_layers") or [])
    layers = range(int(config["num_hidden_layers"]))
    return {
        # transformers 5 writes num_local_experts
        "num_experts": int(config["num_experts"] if "num_experts" in config else config["num_local_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_ffn_size": int(config["moe_intermediate_size"]),
        "dense_layers": tuple(i for i in layers if i in listed or (i + 1) % step != 0),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
    }


def _rope_factor(rope: Mapping[str, Any]) -> float:
    """Of Llama 3's scaling, whose other constants megatron-core has built in.

    Raises: ConfigError: any other scaling.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind != "llama3":
        raise ConfigError(f"rotary embeddings of type {kind!r} (rope_scaling) are not supported; llama3 ones are")
    for name, built_in in _LLAMA3_ROPE.items():
        if float(rope[name]) != built_in:
            raise ConfigError(f"rope_scaling of type llama3 with {name} {rope[name]} is not supported, only {built_in}")
    return float(rope["factor"])
