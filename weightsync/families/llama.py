"""Llama 3: dense decoders without biases and without norms of queries and keys; its config.json has no windows."""

from weightsync.families.decoder import ATTENTION_RULES, MLP_RULES
from weightsync.families.family import Family

FAMILY = Family(
    model_type="llama",
    models="Llama 3",
    rules=ATTENTION_RULES + MLP_RULES,
    windows="none",
    presets={
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
    },
)
