"""The clipped policy loss, from log-ratios: tensors only, no engine, no process groups.

Clipped ratio: PPO (Schulman et al. 2017); dual clip: Ye et al. 2020.
"""

import torch
from torch import Tensor

from trainer_service.objectives.tokens import TokenLoss

# e^20 is still finite in float32; beyond it a ratio carries no information.
MAX_LOG_RATIO = 20.0


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Compute the ratio of two probabilities from the difference of their logarithms, within e^-20 to e^20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_ratio_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """Compute max(-rho A, -clip(rho) A), for A < 0 at most -dual_clip * A.

    Args:
        log_ratio: [t] log pi_theta - log pi_old, differentiable.
        advantages: [t] each token's advantage.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: c > 1, or None.

    >>> log_rho, advantages = torch.tensor([2.0, 2.0, 0.5]).log(), torch.tensor([2.0, -2.0, 2.0])
    >>> out = clipped_ratio_loss(log_rho, advantages, clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    >>> [round(x, 6) for x in out.loss.tolist()]
    [-2.4, 3.0, -1.0]
    """
    ratio = ratio_of(log_ratio)
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
