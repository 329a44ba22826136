"""CISPO: the clipped ratio is a weight, and every token keeps its gradient (MiniMax-M1, section 3.1)."""

import torch

from tandem_config.schema import GrpoSection
from trainer_service.objectives.clipping import ratio_of
from trainer_service.objectives.tokens import TokenLoss, Tokens


def token_loss(tokens: Tokens, grpo: GrpoSection) -> TokenLoss:
    """Compute -min(rho, 1 + clip_high) A log pi_theta of each token, without a gradient through the ratio."""
    ratio = ratio_of((tokens.logprobs - tokens.old_logprobs).detach())
    bound = 1 + grpo.clip_high
    return TokenLoss(
        loss=-ratio.clamp(max=bound) * tokens.advantages * tokens.logprobs,
        ratio=ratio,
        clipped_low=torch.zeros_like(ratio, dtype=torch.bool),
        clipped_high=ratio > bound,
    )
