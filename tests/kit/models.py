"""Tiny random Hugging Face models; no weight has its default value, so that a missed weight shows."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.kit.folders import write_tokenizer

if TYPE_CHECKING:  # the import takes seconds; some processes need only the sizes
    from transformers import PreTrainedModel

Sizes = dict[str, Any]
VOCABULARY = 97  # a prime: padded by SGLang, and by a trainer of TP 2
CONTEXT = 512
SHORT = 32  # of a model with a rotary scaling, which stretches it by 4
STOP = 5
_SERVED: Sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": None,  # tests choose where completions end
    "bos_token_id": None,
}
_HEAD: Sizes = {"head_dim": 16}
_EXPERTS: Sizes = _HEAD | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# No mlp_only_layers: SGLang 0.5.23 gives every layer of a mixture experts.
_SERVED_OF: dict[str, Sizes] = {"qwen3": _HEAD, "qwen3_moe": _EXPERTS | {"num_experts": 8}}

TRAINED_VOCABULARY = 127  # odd: padded under TP 2
# With head_dim 16 it is twice hidden / heads.
_TRAINED: Sizes = {
    "vocab_size": TRAINED_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
}
# Llama 3's own constants; at 64 positions the stretched frequencies still change every log-prob
ROPE: Sizes = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: Sizes = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
_TIED: Sizes = {"tie_word_embeddings": True}
_FOUR_EXPERTS = _EXPERTS | {"num_experts": 4}
# Models of the trainer's tests: family, and what differs from _TRAINED.
KINDS: dict[str, tuple[str, Sizes]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", _TIED),
    # other numbers of layers, which leave places for the embedding, or for embedding and loss
    "qwen2-1-layer": ("qwen2", {"num_hidden_layers": 1}),
    "qwen2-5-layers": ("qwen2", {"num_hidden_layers": 5}),
    "qwen2-tied-6-layers": ("qwen2", _TIED | {"num_hidden_layers": 6}),
    "qwen3": ("qwen3", _HEAD),
    "qwen2-kv1": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3-kv1": ("qwen3", _HEAD | {"num_key_value_heads": 1}),
    "qwen3-moe": ("qwen3_moe", _FOUR_EXPERTS),
    # the second layer is dense, and the chosen experts' weights do not add up to 1
    "qwen3-moe-mixed": ("qwen3_moe", _FOUR_EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "llama": ("llama", _HEAD | {"rope_parameters": ROPE}),
    "llama-tied": ("llama", _TIED),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
}


def _build(family: str, seed: int, sizes: Sizes) -> "PreTrainedModel":
    """Make a model of 4 heads and 2 KV heads with random float32 weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **heads | sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, which would hide a mix-up
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


def make_model(folder: Path, family: str = "qwen3", tied: bool = False, seed: int = 0, **changes: object) -> Path:
    """Write a checkpoint for an engine, by default with two layers."""
    sizes = _SERVED | {"tie_word_embeddings": tied} | _SERVED_OF.get(family, {}) | changes
    _build(family, seed, sizes).save_pretrained(folder)
    write_tokenizer(folder, [text_of([token]) for token in range(VOCABULARY)])
    return folder


def text_of(token_ids: Sequence[int]) -> str:
    """Decode tokens as the tokenizer of make_model does: a character each."""
    return "".join(chr(0x4E00 + token) for token in token_ids)


def trained_model(kind: str, seed: int = 0) -> "PreTrainedModel":
    """Make a model of KINDS."""
    family, changes = KINDS[kind]
    return _build(family, seed, _TRAINED | changes)


def save_model(kind: str, folder: Path, seed: int = 0) -> "PreTrainedModel":
    """Make a model of KINDS and write it to a folder."""
    model = trained_model(kind, seed)
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> "PreTrainedModel":
    """Load a model in float32."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def as_sglang_scales(model: Any, longest: int) -> "PreTrainedModel":
    """Keep `dynamic` rotary frequencies as transformers has them in a sequence of the longest length."""
    rotary = model.model.rotary_emb
    if rotary.rope_type == "dynamic":
        with torch.no_grad():
            model(torch.zeros(1, longest, dtype=torch.long))
        rotary.rope_type = "default"  # or the next, shorter sequence would change them again
    scaled: PreTrainedModel = model
    return scaled


def logprobs(folder: Path, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """Compute log softmax(logits / temperature), [T, vocabulary], at the completion's positions with transformers."""
    model = as_sglang_scales(load(folder), 4 * SHORT)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
