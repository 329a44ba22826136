"""The loss as the papers write it, in float64 NumPy: one sequence at a time, probabilities and not their logarithms."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem_config.schema import GrpoSection

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Log-probs of a completion's tokens, [T] each, and its advantage."""

    new: Array
    old: Array
    rollout: Array
    advantage: float


def clipped(ratio: Array, advantage: float, grpo: GrpoSection) -> Array:
    """PPO's clipped surrogate, which is to be maximised."""
    bounded = np.minimum(np.maximum(ratio, 1 - grpo.clip_low), 1 + grpo.clip_high)
    return np.minimum(ratio * advantage, bounded * advantage)


def surrogate(sequence: Sequence, start: Sequence, grpo: GrpoSection) -> Array:
    """Each token's objective, [T]. start: the sequence where gradients are taken, for what has none itself."""
    ratio, advantage = np.exp(sequence.new) / np.exp(sequence.old), sequence.advantage
    if grpo.objective == "gspo":
        of_sequence = np.full(ratio.size, np.prod(ratio) ** (1 / ratio.size))
        return clipped(of_sequence, advantage, grpo)
    if grpo.objective == "cispo":
        weight = np.minimum(np.exp(start.new) / np.exp(start.old), 1 + grpo.clip_high)
        return weight * advantage * sequence.new
    gain = clipped(ratio, advantage, grpo)
    return gain if grpo.dual_clip is None or advantage >= 0 else np.maximum(gain, grpo.dual_clip * advantage)


def weights(sequence: Sequence, grpo: GrpoSection) -> Array:
    """Each token's weight for the difference of trainer and engine, [T]."""
    ratio = np.exp(sequence.old) / np.exp(sequence.rollout)
    if grpo.correction_level != "token":
        power = 1 if grpo.correction_level == "sequence" else 1 / ratio.size
        ratio = np.full(ratio.size, np.prod(ratio) ** power)
    low, high = grpo.correction_low or 0.0, grpo.correction_high or np.inf
    if grpo.correction == "tis":
        return np.minimum(np.maximum(ratio, low), high)
    if grpo.correction in ("icepop", "mis"):
        return np.array([w if low <= w <= high else 0.0 for w in ratio])
    return ratio if grpo.correction == "importance" else np.ones(ratio.size)


def token_losses(sequences: list[Sequence], starts: list[Sequence], grpo: GrpoSection) -> list[Array]:
    """The loss of each token of each sequence, weighted."""
    return [-surrogate(one, start, grpo) * weights(one, grpo) for one, start in zip(sequences, starts, strict=True)]


def aggregated(losses: list[Array], grpo: GrpoSection) -> float:
    """One number from the losses of all tokens."""
    if grpo.aggregation == "token-mean":
        return float(np.mean(np.concatenate(losses)))
    if grpo.aggregation == "seq-mean-token-mean":
        return float(np.mean([np.mean(losses_T) for losses_T in losses]))
    sums = [np.sum(losses_T) for losses_T in losses]
    return float(np.mean(sums)) / (grpo.max_new_tokens if grpo.aggregation == "dr-grpo" else 1)


def divergence(new: Array, reference: Array, estimator: str) -> Array:
    """Each token's estimate of KL(pi || pi_ref), [T], from r = pi_ref / pi, as Schulman's note writes them."""
    ratio = np.exp(reference) / np.exp(new)
    if estimator == "k1":
        return -np.log(ratio)
    return np.log(ratio) ** 2 / 2 if estimator == "k2" else (ratio - 1) - np.log(ratio)


def decoupled(sequence: Sequence, low: float, high: float) -> Array:
    """Decoupled PPO's objective of each token, with both policies over the behaviour policy (AReaL)."""
    behaviour, proximal, current = (np.exp(logs) for logs in (sequence.rollout, sequence.old, sequence.new))
    bounded = np.clip(current / proximal, 1 - low, 1 + high) * proximal / behaviour
    return np.minimum(current / behaviour * sequence.advantage, bounded * sequence.advantage)
