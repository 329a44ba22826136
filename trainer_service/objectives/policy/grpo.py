"""GRPO: the ratio of each token, clipped (DeepSeekMath, section 4.1.1; the policy term of DAPO and Dr. GRPO too)."""

from tandem_config.schema import GrpoSection
from trainer_service.objectives.clipping import clipped_ratio_loss
from trainer_service.objectives.tokens import TokenLoss, Tokens


def token_loss(tokens: Tokens, grpo: GrpoSection) -> TokenLoss:
    """Compute max(-rho A, -clip(rho) A) of each token, rho = pi_theta / pi_old."""
    return clipped_ratio_loss(
        tokens.logprobs - tokens.old_logprobs,
        tokens.advantages,
        clip_low=grpo.clip_low,
        clip_high=grpo.clip_high,
        dual_clip=grpo.dual_clip,
    )
