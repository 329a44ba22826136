"""Tiny random models with every weight away from its default, so that a weight that was missed shows."""

import json
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 96
CONTEXT = 512
STOP = 5


def make_model(folder: Path, family: str = "qwen3", tied: bool = False, seed: int = 0) -> Path:
    """A float32 checkpoint of two layers, 4 heads, 2 KV heads."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "eos_token_id": None,  # a completion ends where a test says
        "bos_token_id": None,
        "initializer_range": 0.2,
        "dtype": "float32",
    }
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}), encoding="utf-8")
    return folder


def logprobs(folder: Path, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """transformers' [T, vocabulary] log softmax(logits / temperature) at the completion's positions."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
