"""Settings, samples and the transformers step that the trainer is compared with; the worker processes import this."""

import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.kit.models import TRAINED_VOCABULARY
from trainer_service.batch.samples import Samples

NUM_UPDATES = 2

# Every term of the loss is on, and micro-batches are small, so that samples are really cut up.
CONFIG: dict[str, Any] = {
    "data": {"train": "none.jsonl"},
    "grpo": {
        "temperature": 0.9,
        "dual_clip": 3.0,
        "clip_low": 0.05,
        "clip_high": 0.1,
        "tis_cap": 1.2,
        "entropy_coefficient": 0.01,
        "aggregation": "token-mean",
        "old_logprobs": "recompute",
    },
    # eps well above rounding: AdamW's first steps divide gradients by their own size, rounding included
    "trainer": {"learning_rate": 1e-3, "adam_eps": 1e-5, "max_tokens_per_micro_batch": 64, "clip_grad": 0.5},
}

# What of "grpo" differs. Without an entropy bonus samples of advantage 0 are left out of training.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "decay": {},
    "skips": {"entropy_coefficient": 0.0},
    "rollout": {"entropy_coefficient": 0.0, "old_logprobs": "rollout", "tis_cap": None},
}
# What of "trainer" differs.
TRAINER_VARIANTS: dict[str, dict[str, Any]] = {"decay": {"weight_decay": 0.1}}


def make_samples(num_samples: int = 24, seed: int = 1) -> Samples:
    """Ragged samples for NUM_UPDATES updates; some masked, some with advantage 0."""
    random = np.random.default_rng(seed)
    prompts = random.integers(1, 9, num_samples)
    completions = random.integers(1, 12, num_samples)
    advantages = random.normal(size=num_samples).astype(np.float32)
    advantages[::7] = 0
    return Samples(
        sample_ids=tuple(f"s{i}" for i in range(num_samples)),
        update_index=np.repeat(np.arange(NUM_UPDATES), num_samples // NUM_UPDATES),
        prompt_lengths=prompts,
        completion_lengths=completions,
        token_ids=random.integers(0, TRAINED_VOCABULARY, int((prompts + completions).sum())),
        rollout_logprobs=random.normal(-4, 1, int(completions.sum())).astype(np.float32),
        advantages=advantages,
        trainable=np.arange(num_samples) % 5 != 0,
    )


def write_samples(samples: Samples, path: Path) -> None:
    """As .npz."""
    arrays: dict[str, Any] = {field.name: np.asarray(getattr(samples, field.name)) for field in fields(samples)}
    np.savez(path, **arrays)


def read_samples(path: Path) -> Samples:
    """What write_samples wrote."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return Samples(**{**arrays, "sample_ids": tuple(arrays["sample_ids"].tolist())})


def saved_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors as it writes them: by expert, where transformers keeps those of a layer as one tensor."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def token_logprobs(model: Any, samples: Samples, rows: Any, temperature: float) -> tuple[Any, Any]:
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


def with_noisy_rollout(samples: Samples, model: Any) -> Samples:
    """The samples with log-probs near the model's own, as an engine with other rounding would return them."""
    with torch.no_grad():
        exact, _ = token_logprobs(model, samples, range(len(samples)), CONFIG["grpo"]["temperature"])
    noise = np.random.default_rng(2).normal(0, 0.2, exact.shape).astype(np.float32)
    return replace(samples, rollout_logprobs=exact.numpy() + noise)


def reference_step(model: Any, samples: Samples, grpo: dict[str, Any], weight_decay: float = 0.0) -> dict[str, float]:
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
