"""The GRPO loss on flat completion tokens: tensors only, no engine, no process groups.

Legend: t completion tokens of a micro-batch, S samples of an optimizer update. Every aggregation is a sum over tokens
of `weight * token loss`, where the weights hold the *global* denominators of the update: so micro-batches and
data-parallel ranks add up to the same loss and the same gradient however the update is cut.

Clipped ratio: PPO (Schulman et al. 2017); dual clip: Ye et al. 2020; with group-relative advantages: DeepSeekMath.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]

# e^20 is still finite in float32; beyond it a ratio carries no information.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The loss and its details per completion token, [t] each."""

    loss: Tensor  # differentiable
    ratio: Tensor  # pi_theta / pi_old, detached
    clipped_low: Tensor  # bool: the lower bound was active (A < 0)
    clipped_high: Tensor  # bool: the upper bound was active (A > 0)


def clipped_ratio_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """Compute max(-rho A, -clip(rho) A), for A < 0 at most -dual_clip * A.

    Args:
        logprobs: [t] log pi_theta, differentiable.
        old_logprobs: [t] log pi at the start of the step.
        advantages: [t] each token's advantage.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: c > 1, or None.

    >>> rho = torch.tensor([2.0, 2.0, 0.5])
    >>> out = clipped_ratio_loss(
    ...     rho.log(), torch.zeros(3), torch.tensor([2.0, -2.0, 2.0]), clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    >>> [round(x, 6) for x in out.loss.tolist()]
    [-2.4, 3.0, -1.0]
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    detached = ratio.detach()
    return TokenLoss(
        loss=loss,
        ratio=detached,
        clipped_low=(detached < 1 - clip_low) & (advantages < 0),
        clipped_high=(detached > 1 + clip_high) & (advantages > 0),
    )


def sample_weights(completion_lengths: Tensor, aggregation: Aggregation, *, max_new_tokens: int) -> Tensor:
    """Compute the weight of a completion token of each sample; all samples of the update count, trainable or not.

    token-mean: 1 / (tokens of the update). seq-mean-token-mean: 1 / (S * the sample's tokens). seq-mean-token-sum:
    1 / S. dr-grpo: 1 / (S * max_new_tokens), a constant length normaliser.

    Args:
        completion_lengths: [S] of the *whole* update, all data-parallel ranks and micro-batches.
    Returns: [S] float32.

    >>> sample_weights(torch.tensor([1, 3]), "seq-mean-token-mean", max_new_tokens=4).tolist()
    [0.5, 0.1666666716337204]
    """
    lengths = completion_lengths.double()
    num_samples = completion_lengths.numel()
    if aggregation == "token-mean":
        weights = torch.full_like(lengths, 1.0) / lengths.sum()
    elif aggregation == "seq-mean-token-mean":
        weights = 1.0 / (num_samples * lengths)
    elif aggregation == "seq-mean-token-sum":
        weights = torch.full_like(lengths, 1.0 / num_samples)
    elif aggregation == "dr-grpo":
        weights = torch.full_like(lengths, 1.0 / (num_samples * max_new_tokens))
    else:
        raise ValueError(f"unknown aggregation {aggregation!r}")
    return weights.float()


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """Compute the weights of truncated importance sampling: min(pi_old / pi_roll, cap), detached; all [t]."""
    log_ratio = (old_logprobs - rollout_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp().clamp(max=cap)


def kl_k3(sampled_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Estimate KL(sampled || other) per token by k3: e^d - d - 1 >= 0, d = other - sampled; all [t]."""
    delta = (other_logprobs - sampled_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return delta.exp() - delta - 1
