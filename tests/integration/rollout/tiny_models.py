"""Tiny random models with every weight away from its default, so that a weight that was missed shows."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 97  # no multiple of anything: padded by SGLang, and by a trainer of TP 2
CONTEXT = 512
STOP = 5


def make_model(folder: Path, family: str = "qwen3", tied: bool = False, seed: int = 0, **changes: object) -> Path:
    """A float32 checkpoint of 4 heads and 2 KV heads, by default with two layers."""
    torch.manual_seed(seed)
    sizes: dict[str, object] = {
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
    model = _FAMILIES[family](sizes | changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}), encoding="utf-8")
    return folder


# No mlp_only_layers: SGLang 0.5.23 gives every layer of this family experts.
_EXPERTS: dict[str, object] = {"moe_intermediate_size": 24, "norm_topk_prob": True}
_FAMILIES: dict[str, Callable[[dict[str, object]], PreTrainedModel]] = {
    "qwen2": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes)),
    "qwen3": lambda sizes: Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 16, **sizes})),
    "llama": lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
    "qwen3_moe": lambda sizes: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**{"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, **_EXPERTS, **sizes})
    ),
}


def logprobs(folder: Path, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """transformers' [T, vocabulary] log softmax(logits / temperature) at the completion's positions."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
