"""Qwen3-MoE: Qwen3 with a mixture of experts in its layers."""

from typing import Any

from weightsync.families.decoder import ATTENTION_RULES, EXPERT_RULES, MLP_RULES
from weightsync.families.family import Family

_BASE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}

FAMILY = Family(
    model_type="qwen3_moe",
    models="Qwen3-MoE",
    rules=ATTENTION_RULES + MLP_RULES + EXPERT_RULES,
    qk_norm=True,
    experts=True,
    windows="all",
    presets={
        "qwen3-30b-a3b": {
            **_BASE,
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
        },
        "qwen3-235b-a22b": {
            **_BASE,
            "num_hidden_layers": 94,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
        },
        # A Qwen3-MoE of the size of DeepSeek-V3, whose own attention has no mapping rules.
        "deepseek-v3-sized": {
            **_BASE,
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
    },
)
