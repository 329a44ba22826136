"""Computes the metrics of a step, which the coordinator reports, from the sums of its updates.

The 99.9 % quantile of differences of log-probs comes from counts by size: ranks add them up, and none has to hold all.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_service.micro_batches.samples import Samples

QUANTILE = 0.999
# Sizes double every 32 bins, 2.2 % each: from 6e-8, below the rounding of float32, to 128 nats.
_PER_DOUBLING = 32
_LOWEST, _HIGHEST = -24, 7
_BINS = (_HIGHEST - _LOWEST) * _PER_DOUBLING


def step_metrics(
    sums: NDArray[np.float64],
    names: Sequence[str],
    grad_norms: Sequence[float],
    abs_diff: tuple[float, float],
    learning_rate: float,
    samples: Samples,
    *,
    skipped_updates: int = 0,
    kl_in_loss: bool = False,
) -> dict[str, float]:
    """Compute the means over a step.

    Args:
        sums: [updates, len(names)] summed over all ranks.
        grad_norms: of the updates that were done.
        abs_diff: 99.9 % quantile and largest of the differences from the engine's log-probs.
        skipped_updates: those that were left out, because something in them was not finite.
    Returns: loss and grad_norm: mean over updates that were done, NaN if none was (grad_norm before clipping).
        ratio_mean, kl_old, kl_reference, clip_fraction_*, correction_*: mean over the completion tokens that were
        trained on, in each epoch. kl_loss: the part of the loss that is the KL term. entropy, logprob_abs_diff_*: over
        those whose log-probs were computed under the policy that the step started from (with old_logprobs "recompute":
        all); of logprob_abs_diff_* those for which the engine has one too. engine_logprobs_not_finite: tokens for which
        it has none.
    """
    total = dict(zip(names, sums.sum(axis=0), strict=True))
    trained, measured = max(total["trained_tokens"], 1.0), max(total["measured_tokens"], 1.0)
    num_updates = float(len(grad_norms)) or math.nan
    out = {
        "loss": total["loss"] / num_updates,
        "grad_norm": sum(grad_norms) / num_updates,
        "entropy": total["entropy"] / measured,
        "clip_fraction_low": total["clipped_low"] / trained,
        "clip_fraction_high": total["clipped_high"] / trained,
        "ratio_mean": total["ratio"] / trained,
        "kl_old": total["kl_old"] / trained,
        "logprob_abs_diff_mean": total["logprob_abs_diff"] / max(total["compared_tokens"], 1.0),
        "logprob_abs_diff_p999": abs_diff[0],
        "logprob_abs_diff_max": abs_diff[1],
        "tokens": float(samples.counted_lengths.sum()),
        "trained_tokens": total["trained_tokens"],
        "measured_tokens": total["measured_tokens"],
        "samples": float(samples.episode[-1] + 1),
        "learning_rate": learning_rate,
        "skipped_updates": float(skipped_updates),
        "engine_logprobs_not_finite": float(samples.engine_not_finite.sum()),
    }
    if kl_in_loss:
        out["kl_reference"] = total["kl_reference"] / trained
        out["kl_loss"] = total["kl_loss"] / num_updates
    if total["correction_weight"] > 0 or total["correction_outside"] > 0:
        out["correction_weight_mean"] = total["correction_weight"] / trained
        out["correction_outside_fraction"] = total["correction_outside"] / trained
    return {name: float(value) for name, value in out.items()}


def empty_counts(device: torch.device | None) -> Tensor:
    """Make counts of nothing, [bins] int64."""
    return torch.zeros(_BINS, dtype=torch.int64, device=device)


def count_by_size(sizes: Tensor, which: Tensor, counts: Tensor) -> None:
    """Add [t] sizes, >= 0, to the counts, in place, where `which` is true; the device is not waited for."""
    bins = ((sizes.log2() - _LOWEST) * _PER_DOUBLING).floor().clamp(0, _BINS - 1).long()
    counts.index_add_(0, bins, which.long())


def quantile_of(counts: NDArray[np.int64], largest: float) -> float:
    """Return a size that 99.9 % of what was counted do not exceed: at most 2.2 % more than the smallest such.

    >>> sizes = torch.full((2000,), 0.01)
    >>> sizes[:3] = 5.0
    >>> counts = empty_counts(None)
    >>> count_by_size(sizes, torch.ones(2000, dtype=torch.bool), counts)
    >>> round(quantile_of(counts.numpy(), 5.0), 2), quantile_of(empty_counts(None).numpy(), 0.0)
    (5.0, 0.0)
    """
    reached = np.searchsorted(counts.cumsum(), QUANTILE * counts.sum())
    return min(largest, float(2.0 ** (_LOWEST + (reached + 1) / _PER_DOUBLING)))
