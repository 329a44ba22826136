"""Computes the metrics of a step, which the coordinator reports, from the sums of its updates."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer_service.batch.samples import Samples


def step_metrics(
    sums: NDArray[np.float64],
    names: Sequence[str],
    grad_norms: Sequence[float],
    abs_diff_max: float,
    learning_rate: float,
    samples: Samples,
) -> dict[str, float]:
    """Compute the means over a step.

    Args:
        sums: [updates, len(names)] summed over all ranks.
    Returns: loss and grad_norm: mean over updates (grad_norm before clipping). ratio_mean, kl_old, clip_fraction_*,
        correction_*: mean over the completion tokens that were trained on. entropy, logprob_abs_diff_*: over those
        whose log-probs were computed under the policy that the step started from (with old_logprobs "recompute": all).
    """
    total = dict(zip(names, sums.sum(axis=0), strict=True))
    trained, measured = max(total["trained_tokens"], 1.0), max(total["measured_tokens"], 1.0)
    out = {
        "loss": total["loss"] / len(grad_norms),
        "grad_norm": float(np.mean(grad_norms)),
        "entropy": total["entropy"] / measured,
        "clip_fraction_low": total["clipped_low"] / trained,
        "clip_fraction_high": total["clipped_high"] / trained,
        "ratio_mean": total["ratio"] / trained,
        "kl_old": total["kl_old"] / trained,
        "logprob_abs_diff_mean": total["logprob_abs_diff"] / measured,
        "logprob_abs_diff_max": abs_diff_max,
        "tokens": float(samples.num_completion_tokens),
        "trained_tokens": total["trained_tokens"],
        "measured_tokens": total["measured_tokens"],
        "samples": float(len(samples)),
        "learning_rate": learning_rate,
    }
    if total["correction_weight"] > 0 or total["correction_outside"] > 0:
        out["correction_weight_mean"] = total["correction_weight"] / trained
        out["correction_outside_fraction"] = total["correction_outside"] / trained
    return {name: float(value) for name, value in out.items()}
