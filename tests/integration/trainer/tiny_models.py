"""Tiny Hugging Face checkpoints for the trainer's tests, and the transformers step to compare with."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
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

from tests.integration.trainer.tiny_inputs import CONFIG, NUM_UPDATES, VOCAB
from trainer_service.batch.samples import Samples

EXPERTS: dict[str, Any] = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Llama 3's own constants; at 64 positions the stretched frequencies still change every log-prob
ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "qwen2": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes)),
    "qwen2-tied": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)),
    # other numbers of layers, which leave places for the embedding, or for embedding and loss
    "qwen2-1-layer": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes | {"num_hidden_layers": 1})),
    "qwen2-5-layers": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes | {"num_hidden_layers": 5})),
    "qwen2-tied-6-layers": lambda sizes: Qwen2ForCausalLM(
        Qwen2Config(**sizes | {"num_hidden_layers": 6}, tie_word_embeddings=True)
    ),
    "qwen3": lambda sizes: Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes)),
    "qwen2-kv1": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes | {"num_key_value_heads": 1})),
    "qwen3-kv1": lambda sizes: Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes | {"num_key_value_heads": 1})),
    "qwen3-moe": lambda sizes: Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True, **sizes)),
    # the second layer is dense, and the chosen experts' weights do not add up to 1
    "qwen3-moe-mixed": lambda sizes: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**EXPERTS, norm_topk_prob=False, mlp_only_layers=[1], **sizes)
    ),
    "llama": lambda sizes: LlamaForCausalLM(LlamaConfig(head_dim=16, rope_parameters=ROPE, **sizes)),
    "llama-tied": lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)),
}


def make_model(kind: str) -> PreTrainedModel:
    """4 layers, GQA 4/2, random float32; with head_dim 16 it is twice hidden / heads."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    model = KINDS[kind](common)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, which would hide a mix-up
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


def save_model(kind: str, folder: Path) -> PreTrainedModel:
    """The model, written to a folder."""
    model = make_model(kind)
    model.save_pretrained(folder)
    return model


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors as it writes them: by expert, where transformers keeps those of a layer as one tensor."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def token_logprobs(model: PreTrainedModel, samples: Samples, rows: Any, temperature: float) -> tuple[Any, Any]:
    """Log-probs and entropies of the completion tokens of some samples, one sequence at a time."""
    logprobs, entropies = [], []
    for i in rows:
        start, length = int(samples.token_starts[i]), int(samples.lengths[i])
        ids = torch.from_numpy(samples.token_ids[start : start + length])
        prompt = int(samples.prompt_lengths[i])
        full = (model(ids[None]).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
        logprobs.append(full.gather(-1, ids[prompt:, None])[:, 0])
        entropies.append(-(full.exp() * full).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def with_noisy_rollout(samples: Samples, model: PreTrainedModel) -> Samples:
    """The samples with log-probs near the model's own, as an engine with other rounding would return them."""
    with torch.no_grad():
        exact, _ = token_logprobs(model, samples, range(len(samples)), CONFIG["grpo"]["temperature"])
    noise = np.random.default_rng(2).normal(0, 0.2, exact.shape).astype(np.float32)
    return replace(samples, rollout_logprobs=exact.numpy() + noise)


def reference_step(
    model: PreTrainedModel, samples: Samples, grpo: dict[str, Any], weight_decay: float = 0.0
) -> dict[str, float]:
    """The same GRPO step with transformers, autograd and torch's AdamW; changes the model.

    Written from the definitions of the algorithm, not from our code: one sequence at a time, nothing left out.
    """
    trainer = CONFIG["trainer"]
    rollout = torch.from_numpy(samples.rollout_logprobs)
    old = rollout
    if grpo["old_logprobs"] == "recompute":
        with torch.no_grad():
            old, _ = token_logprobs(model, samples, range(len(samples)), grpo["temperature"])
    advantages = torch.from_numpy(samples.per_token(samples.advantages))
    mask = torch.from_numpy(samples.per_token(samples.trainable))
    update_of_token = torch.from_numpy(samples.per_token(samples.update_index))
    # The usual groups: matrices decay, norms and biases do not.
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=trainer["learning_rate"], eps=trainer["adam_eps"])
    losses, norms = [], []
    for update in range(NUM_UPDATES):
        here = update_of_token == update
        new, entropy = token_logprobs(model, samples, samples.of_update(update), grpo["temperature"])
        a, m = advantages[here], mask[here]
        rho = (new - old[here]).exp()
        loss = torch.max(-rho * a, -rho.clamp(1 - grpo["clip_low"], 1 + grpo["clip_high"]) * a)
        loss = torch.where(a < 0, torch.min(loss, -grpo["dual_clip"] * a), loss)
        if grpo["tis_cap"] is not None:
            loss = loss * (old - rollout)[here].exp().clamp(max=grpo["tis_cap"])
        total = ((loss - grpo["entropy_coefficient"] * entropy) * m).sum() / here.sum()
        optimizer.zero_grad()
        total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), trainer["clip_grad"])))
        optimizer.step()
        losses.append(float(total.detach()))
    return {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms))}
