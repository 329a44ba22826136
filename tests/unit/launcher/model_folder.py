"""Tiny Hugging Face folders, configurations and data for the checks; numpy only, no torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from weightsync.layouts.hf import hf_layout
from weightsync.model.spec import ModelSpec

# 4 heads, 2 KV heads, FFN 12, 3 layers: each parallel size has something that it does not divide.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 16,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32,
    "eos_token_id": 1,
}
WORDS = ["<pad>", "<eos>", *"0123456789", "+", "="]


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor that the configuration implies, zeros."""
    layout = hf_layout(ModelSpec.from_config(config))
    return {name: np.zeros(shape, np.float32) for name, shape in zip(layout.params, layout.param_shapes, strict=True)}


def write_model(folder: Path, **changes: Any) -> Path:
    """A whole model folder in one file; `changes` go into config.json only, a value of None removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors(CONFIG), folder / "model.safetensors")
    write_tokenizer(folder, WORDS)
    return folder


def write_sharded(folder: Path, **changes: Any) -> Path:
    """Like write_model, in two shards with an index."""
    write_model(folder, **changes)
    (folder / "model.safetensors").unlink()
    everything = tensors(CONFIG)
    names = sorted(everything)
    halves = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        save_file({name: everything[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def write_tokenizer(folder: Path, words: list[str]) -> None:
    """One token per character."""
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))


def write_rows(path: Path, count: int = 8, prompt: str = "1+2=") -> Path:
    """A JSONL file of equal rows."""
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "answer": "3"}) + "\n" for _ in range(count)), encoding="utf-8"
    )
    return path


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """A configuration that passes every check, with a model and data beside it; `sections` are merged in."""
    if not (folder / "model").exists():
        write_model(folder / "model")
    if not (folder / "train.jsonl").exists():
        write_rows(folder / "train.jsonl")
    data: dict[str, Any] = {
        "run": {"output_dir": str(folder / "runs"), "name": "tiny", "iterations": 2},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "grpo": {"max_new_tokens": 4, "prompts_per_iteration": 4, "group_size": 4},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    return file
