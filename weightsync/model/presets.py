"""Published models by name, with the sizes of their config.json that `tandem plan` needs."""

from typing import Any

from weightsync.model.spec import ModelSpec

_QWEN2: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 131072}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        **_QWEN2,
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN2,
        "vocab_size": 152064,
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-8b": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-32b": {
        **_QWEN3,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": {
        **_QWEN3_MOE,
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
    "llama-3.1-70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    # A Qwen3-MoE of the size of DeepSeek-V3, whose own attention has no mapping rules.
    "deepseek-v3-sized": {
        **_QWEN3_MOE,
        "vocab_size": 129280,
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 16,
        "num_experts": 256,
        "mlp_only_layers": [0, 1, 2],
    },
}


def preset(name: str) -> ModelSpec:
    """Return the sizes of a published model. Raises: KeyError: the name is unknown."""
    return ModelSpec.from_config(CONFIGS[name])
