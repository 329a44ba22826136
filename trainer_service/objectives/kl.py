"""Estimates of the divergence of two policies, per token."""

from torch import Tensor

from trainer_service.objectives.clipping import MAX_LOG_RATIO


def kl_k3(sampled_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Estimate KL(sampled || other) per token by k3: e^d - d - 1 >= 0, d = other - sampled; all [t]."""
    delta = (other_logprobs - sampled_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return delta.exp() - delta - 1
