"""Settings, samples and log-probs that the trainer is compared with; the worker processes import this."""

import os
import uuid
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.kit.models import TRAINED_VOCABULARY
from tests.kit.processes import zygote
from trainer_service.micro_batches.samples import Samples

NUM_UPDATES = 2
TIMEOUT_S = 1800.0  # of one world size; all slow cases of three took 774 s beside another suite

# Every term of the loss is on, and micro-batches are small, so that samples are really cut up.
CONFIG: dict[str, Any] = {
    "data": {"train": "none.jsonl"},
    "grpo": {
        "temperature": 0.9,
        "dual_clip": 3.0,
        "clip_low": 0.05,
        "clip_high": 0.1,
        "correction": "tis",
        "correction_level": "token",
        "correction_low": None,
        "correction_high": 1.2,
        "objective": "grpo",
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
    "shared": {},
    "chunks": {},
    "skips": {"entropy_coefficient": 0.0},
    "rollout": {
        "entropy_coefficient": 0.0,
        "old_logprobs": "rollout",
        "correction": "none",
        "correction_high": None,
    },
    "gspo": {
        "objective": "gspo",
        "dual_clip": None,
        "clip_low": 0.004,
        "correction": "mis",
        "correction_level": "sequence",
        "correction_low": 0.8,
        "correction_high": 2.0,
    },
    "masked": {"kl_coefficient": 0.05, "kl_estimator": "k3", "aggregation": "seq-mean-token-mean"},
    "masked-gspo": {},
    "cispo": {"objective": "cispo", "dual_clip": None, "correction": "icepop", "correction_low": 0.8},
    "decoupled": {"correction": "importance", "correction_high": None},
    "tis-sequence": {"correction_level": "sequence"},
    "tis-geometric": {"correction_level": "geometric"},
    "mis-token": {"correction": "mis", "correction_low": 0.8},
    "mis-geometric": {"correction": "mis", "correction_level": "geometric", "correction_low": 0.9},
    "dr-grpo": {"aggregation": "dr-grpo", "max_new_tokens": 16},
    "kl-k1": {"kl_coefficient": 0.05, "kl_estimator": "k1"},
    "kl": {"kl_coefficient": 0.05, "kl_estimator": "k3"},
    "epochs": {"kl_coefficient": 0.05, "kl_estimator": "k2", "epochs": 2},
    "recompute": {},
    "recompute-one": {},
    "recompute-parts": {},
}
VARIANTS["masked-gspo"] = VARIANTS["gspo"]
# With a mask: `masked`.
MASKED_VARIANTS = {"masked", "masked-gspo", "masked-shared"}
VARIANTS |= {
    "shared-gspo": VARIANTS["gspo"],
    "shared-kl-epochs": VARIANTS["epochs"],
    "masked-shared": VARIANTS["masked"],
}
# What of "trainer" differs.
TRAINER_VARIANTS: dict[str, dict[str, Any]] = {
    "decay": {"weight_decay": 0.1},
    "shared": {"share_prompts": True},
    "shared-gspo": {"share_prompts": True},
    "shared-kl-epochs": {"share_prompts": True},
    "masked-shared": {"share_prompts": True},
    "recompute": {"recompute": "full"},
    "recompute-one": {"recompute": "full", "recompute_layers": 1},
    "recompute-parts": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp", "moe"]},
}
# Bytes of a chunk of logits, for several in each micro-batch: of two tokens, and of five under TP 2.
CHUNK_VARIANTS = {"chunks": 4 * 64 * 5}


def make_samples(num_samples: int = 24, seed: int = 1, longest: int = 19, group_size: int = 5) -> Samples:
    """Ragged samples of up to `longest` tokens for NUM_UPDATES updates; some masked, some with advantage 0.

    Every group_size samples have a prompt together; those of one are in both updates.
    """
    random = np.random.default_rng(seed)
    first = np.arange(num_samples) // group_size * group_size  # of each sample's group
    prompts = random.integers(1, 9, num_samples)[first]
    completions = random.integers(1, longest - 7, num_samples)
    ids = random.integers(0, TRAINED_VOCABULARY, (num_samples, longest))
    of_prompt = np.arange(longest) < prompts[:, None]
    ids = np.where(of_prompt, ids[first], ids)
    advantages = random.normal(size=num_samples).astype(np.float32)
    advantages[::7] = 0
    return Samples(
        sample_ids=tuple(f"s{i}" for i in range(num_samples)),
        update_index=np.repeat(np.arange(NUM_UPDATES), num_samples // NUM_UPDATES),
        prompt_lengths=prompts,
        completion_lengths=completions,
        token_ids=ids[np.arange(longest) < (prompts + completions)[:, None]],
        rollout_logprobs=random.normal(-4, 1, int(completions.sum())).astype(np.float32),
        advantages=advantages,
        trainable=np.arange(num_samples) % 5 != 0,
    )


def masked(samples: Samples, seed: int = 3) -> Samples:
    """The samples with a run of each completion's tokens masked, at any place; their log-probs are NaN."""
    random, masks = np.random.default_rng(seed), []
    for length in samples.completion_lengths.tolist():
        mask = np.ones(length, np.bool_)
        start = int(random.integers(0, length))
        mask[start : start + 1 + length // 2] = False
        mask[random.integers(0, length)] = True
        masks.append(mask)
    loss_mask = np.concatenate(masks)
    rollout = np.where(loss_mask, samples.rollout_logprobs, np.nan).astype(np.float32)
    return replace(samples, loss_mask=loss_mask, rollout_logprobs=rollout)


def write_samples(samples: Samples, path: Path) -> None:
    """As .npz."""
    arrays: dict[str, Any] = {field.name: np.asarray(getattr(samples, field.name)) for field in fields(samples)}
    np.savez(path, **arrays)


def read_samples(path: Path) -> Samples:
    """What write_samples wrote."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return Samples(**{**arrays, "sample_ids": tuple(arrays["sample_ids"].tolist())})


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


def launch(size: int, folder: Path, worker: str = "tests.integration.trainer.parity_worker") -> None:
    """Raises: RuntimeError: with the last output of the rank that failed."""
    # Another group's processes have met at a store of their own, which would send these to them.
    files = [str(folder / f"store-{uuid.uuid4().hex}"), str(folder / f"cases-{size}.json"), str(folder)]
    logs = [folder / f"world{size}-rank{rank}.log" for rank in range(size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            arguments = [worker, str(rank), str(size), *files]
            processes.append(zygote("trainer_service").start(arguments, environment, output.fileno()))
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        texts = "\n".join(logs[rank].read_text()[-3000:] for rank in failed)
        raise RuntimeError(f"ranks {failed} of {size} ended with {codes}:\n{texts}")
