"""Computes the metrics of a step, which the coordinator reports, from the sums of its updates."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer_service.micro_batches.samples import Samples


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
        "samples": float(len(samples)),
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
