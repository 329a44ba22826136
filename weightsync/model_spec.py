"""What weight sync must know of a model: the sizes that its parameters' shapes are made of."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe", "llama")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of a decoder, from its Hugging Face config.json.

    `head_dim` is stated, not derived: it need not be hidden_size / num_heads (Qwen3-0.6B: 128, not 64).
    num_experts is 0 for a dense model; dense_layers are a mixture-of-experts model's layers without experts.
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Reads a config.json.

        Raises: ConfigError: the model_type is not supported, or a size is missing.
        """
        family = str(config.get("model_type"))
        if family not in SUPPORTED_MODEL_TYPES:
            raise ConfigError(f"model_type {family!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
        try:
            return cls._from_supported(family, config)
        except KeyError as missing:
            raise ConfigError(f"config.json of this {family} model has no {missing}") from None

    @classmethod
    def _from_supported(cls, family: str, config: Mapping[str, Any]) -> "ModelSpec":
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        head_dim = config.get("head_dim")
        rope = config.get("rope_parameters") or {}
        if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            raise ConfigError("scaled rotary embeddings (rope_scaling) are not supported")
        for switch in ("attention_bias", "mlp_bias"):
            if family != "qwen2" and config.get(switch):
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
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            max_positions=int(config["max_position_embeddings"]),
            **(_experts(config) if family == "qwen3_moe" else {}),
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
        "num_experts": int(config["num_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_ffn_size": int(config["moe_intermediate_size"]),
        "dense_layers": tuple(i for i in layers if i in listed or (i + 1) % step != 0),
    }
