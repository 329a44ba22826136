"""Settings and samples of the trainer's parity tests; no transformers here, the worker processes import this."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from trainer_service.batch.samples import Samples

# Odd: under TP 2 the vocabulary is padded.
VOCAB = 127
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
        token_ids=random.integers(0, VOCAB, int((prompts + completions).sum())),
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
