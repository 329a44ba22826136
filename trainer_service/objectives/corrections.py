"""Corrections between the engine that sampled and the trainer: weights from w = pi_old / pi_roll, by `grpo.correction`.

The weights have no gradient and change no denominator. `importance` is the behaviour weight of decoupled PPO (AReaL,
Fu et al. 2025), whose proximal policy is pi_old; `tis` truncates it (Yao et al. 2025), `icepop` (Ring-1T) and `mis`
(masked importance sampling) drop what is too far off.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_config.schema import GrpoSection
from trainer_service.objectives.clipping import ratio_of
from trainer_service.objectives.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The weights of token losses, and where w was outside of the bounds (bool); [t] each."""

    weights: Tensor
    outside: Tensor


def _truncated(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(low, high)


def _masked(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


CORRECTIONS: Mapping[str, Callable[[Tensor, float, float], Tensor]] = {
    "importance": _truncated,  # without bounds: the configuration refuses them
    "tis": _truncated,
    "icepop": _masked,
    "mis": _masked,
}


def correct(tokens: Tokens, grpo: GrpoSection) -> Correction:
    """Compute the weights of a micro-batch's tokens; `grpo.correction` is not none."""
    low = 0.0 if grpo.correction_low is None else grpo.correction_low
    high = torch.inf if grpo.correction_high is None else grpo.correction_high
    ratio = ratio_of(_log_ratio(tokens, grpo.correction_level))
    return Correction(weights=CORRECTIONS[grpo.correction](ratio, low, high), outside=(ratio < low) | (ratio > high))


def _log_ratio(tokens: Tokens, level: str) -> Tensor:
    """Compute log w: of each token, of its sequence (a sum), or the mean over its sequence."""
    difference = (tokens.old_logprobs - tokens.rollout_logprobs).detach()
    if level == "sequence":
        return tokens.sequences.sums(difference)
    return tokens.sequences.means(difference) if level == "geometric" else difference
