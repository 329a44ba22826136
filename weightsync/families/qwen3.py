"""Qwen3: dense decoders that normalise queries and keys."""

from typing import Any

from weightsync.families.decoder import ATTENTION_RULES, MLP_RULES
from weightsync.families.family import Family

_BASE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}

FAMILY = Family(
    model_type="qwen3",
    models="Qwen3",
    rules=ATTENTION_RULES + MLP_RULES,
    qk_norm=True,
    presets={
        "qwen3-8b": {
            **_BASE,
            "num_hidden_layers": 36,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        "qwen3-32b": {
            **_BASE,
            "num_hidden_layers": 64,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    },
)
