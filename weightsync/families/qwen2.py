"""Qwen2 and Qwen2.5: dense decoders whose query, key and value projections have biases."""

from typing import Any

from weightsync.families.decoder import ATTENTION_RULES, MLP_RULES
from weightsync.families.family import Family

_BASE: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 131072}

FAMILY = Family(
    model_type="qwen2",
    models="Qwen2, Qwen2.5",
    rules=ATTENTION_RULES + MLP_RULES,
    qkv_bias=True,
    presets={
        "qwen2.5-1.5b": {
            **_BASE,
            "num_hidden_layers": 28,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        "qwen2.5-7b": {
            **_BASE,
            "vocab_size": 152064,
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    },
)
