"""A whole GRPO step with transformers, autograd and torch's AdamW, which the trainer's is compared with."""

from typing import Any

import numpy as np
import torch

from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, token_logprobs
from trainer_service.micro_batches.samples import Samples, reordered

Gradients = dict[str, torch.Tensor]


def reference_step(
    model: Any,
    samples: Samples,
    grpo: dict[str, Any],
    weight_decay: float = 0.0,
    reference: Any = None,
    gradients: list[Gradients] | None = None,
) -> dict[str, float]:
    """The same GRPO step with transformers, autograd and torch's AdamW; changes the model.

    Args:
        gradients: gets those of each update, by parameter, before they are clipped.

    Written from the definitions of the algorithm, not from our code: one sequence at a time, nothing left out; masked
    tokens are taken away after log-probs are computed, before anything is computed from these.
    """
    trainer, beta = CONFIG["trainer"], grpo.get("kl_coefficient", 0.0)
    rollout = torch.from_numpy(samples.rollout_logprobs)
    near = rollout
    if beta:
        with torch.no_grad():
            near, _ = token_logprobs(reference, samples, range(len(samples)), grpo["temperature"])
    old = rollout
    if grpo["old_logprobs"] == "recompute":
        with torch.no_grad():
            old, _ = token_logprobs(model, samples, range(len(samples)), grpo["temperature"])
    advantages = torch.from_numpy(samples.per_token(samples.advantages))
    mask = torch.from_numpy(samples.per_token(samples.trainable))
    counts = torch.from_numpy(samples.loss_mask) if samples.loss_mask.size else torch.ones(len(mask), dtype=torch.bool)
    # The usual groups: matrices decay, norms and biases do not.
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=trainer["learning_rate"], eps=trainer["adam_eps"])
    losses, norms, divergences = [], [], []
    for epoch in range(grpo.get("epochs", 1)):
        # the order itself is ours to choose
        samples = reordered(samples, NUM_UPDATES, [0, 0, epoch]) if epoch > 0 else samples
        for update in range(NUM_UPDATES):
            here = torch.from_numpy(samples.per_token(samples.update_index == update))
            both = token_logprobs(model, samples, samples.of_update(update), grpo["temperature"])
            new, entropy = (each[counts[here]] for each in both)
            here &= counts
            a, m = advantages[here], mask[here]
            starts = samples.completion_starts[samples.of_update(update)]
            sizes = samples.completion_lengths[samples.of_update(update)]
            lengths = [int(counts[start : start + size].sum()) for start, size in zip(starts, sizes, strict=True)]
            loss = policy_loss(grpo, new, old[here], a, lengths) * correction(grpo, (old - rollout)[here], lengths)
            loss = loss - grpo["entropy_coefficient"] * entropy
            if beta:
                loss = loss + beta * divergence(new, near[here], grpo["kl_estimator"])
                divergences.append(divergence(new.detach(), near[here], "k3")[m])
            if samples.continues.size:  # a mean over episodes, of several sequences each
                begins = ~samples.continues[samples.of_update(update)]
                lengths = [sum(part) for part in np.split(lengths, np.flatnonzero(begins)[1:])]
            total = aggregate(grpo, loss * m, lengths)
            optimizer.zero_grad()
            total.backward()
            if gradients is not None:
                gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), trainer["clip_grad"])))
            optimizer.step()
            losses.append(float(total.detach()))
    metrics = {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms))}
    return metrics | ({"kl_reference": float(torch.cat(divergences).mean())} if beta else {})


def aggregate(grpo: dict[str, Any], loss: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The loss of an update, of which samples that are not trainable are zeros."""
    if grpo["aggregation"] == "token-mean":
        return loss.sum() / sum(lengths)
    if grpo["aggregation"] == "dr-grpo":
        return loss.sum() / (len(lengths) * grpo["max_new_tokens"])
    assert grpo["aggregation"] == "seq-mean-token-mean"
    return torch.stack([part.sum() / part.numel() for part in loss.split(lengths)]).mean()


def divergence(new: torch.Tensor, near: torch.Tensor, estimator: str) -> torch.Tensor:
    """Schulman's estimators, from the ratio r = reference / policy: -log r, (log r)^2 / 2, r - 1 - log r."""
    ratio = near.exp() / new.exp()
    return {"k1": -ratio.log(), "k2": ratio.log() ** 2 / 2, "k3": ratio - 1 - ratio.log()}[estimator]


def policy_loss(grpo: dict[str, Any], new: torch.Tensor, old: torch.Tensor, a: Any, lengths: list[int]) -> torch.Tensor:
    """Each token's loss by the definitions; a ratio of sequences has its gradient by autograd, through the mean."""
    rho = (new - old).exp()
    if grpo["objective"] == "cispo":
        return -rho.detach().clamp(max=1 + grpo["clip_high"]) * a * new
    if grpo["objective"] == "gspo":
        rho = torch.cat([part.mean().exp().expand(part.numel()) for part in (new - old).split(lengths)])
    loss = torch.max(-rho * a, -rho.clamp(1 - grpo["clip_low"], 1 + grpo["clip_high"]) * a)
    return loss if grpo["dual_clip"] is None else torch.where(a < 0, torch.min(loss, -grpo["dual_clip"] * a), loss)


def correction(grpo: dict[str, Any], difference: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Each token's weight, from log pi_old - log pi_roll."""
    if grpo["correction"] == "none":
        return torch.ones_like(difference)
    if grpo["correction_level"] != "token":
        whole = {"sequence": torch.sum, "geometric": torch.mean}[grpo["correction_level"]]
        difference = torch.cat([whole(part).expand(part.numel()) for part in difference.split(lengths)])
    weight = difference.exp()
    low, high = grpo["correction_low"] or 0.0, grpo["correction_high"] or torch.inf
    inside = weight.clamp(low, high)
    return torch.where(weight == inside, weight, 0.0) if grpo["correction"] in ("icepop", "mis") else inside
