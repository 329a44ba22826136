"""The models and the parallel sizes that are measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer layout and the rollout replicas that it feeds."""

    name: str
    trainer: Parallel
    replicas: tuple[Parallel, ...]


CASES = (
    Case(name="TP2 -> TP2", trainer=Parallel(tensor=2), replicas=(Parallel(tensor=2),)),
    Case(name="PP2 -> TP2", trainer=Parallel(pipeline=2), replicas=(Parallel(tensor=2),)),
    Case(name="TP2 -> 2 x TP1", trainer=Parallel(tensor=2), replicas=(Parallel(), Parallel())),
)

# (layers, hidden, FFN, heads, KV heads, vocabulary); the last is Qwen2.5-0.5B.
_SIZES = {
    "tiny": (2, 64, 128, 4, 2, 512),
    "50m": (8, 512, 2048, 8, 2, 32000),
    "150m": (16, 768, 2048, 12, 2, 64000),
    "0.5b": (24, 896, 4864, 14, 2, 151936),
}
SHAPES = tuple(_SIZES)
DEFAULT_SHAPES = ("tiny", "50m", "0.5b")


def config_of(shape: str) -> dict[str, Any]:
    """Make the config.json of a shape: Qwen2, tied, bfloat16."""
    layers, hidden, ffn, heads, kv_heads, vocabulary = _SIZES[shape]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def write_model(shape: str, folder: Path) -> ModelSpec:
    """Write a model folder without weights: engines start with random ones, and trainers make their own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape)), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    return ModelSpec.from_folder(folder)
