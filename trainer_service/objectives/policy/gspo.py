"""GSPO: the ratio of each sequence, clipped (Group Sequence Policy Optimization, Zheng et al. 2025)."""

from tandem_config.schema import GrpoSection
from trainer_service.objectives.clipping import clipped_ratio_loss
from trainer_service.objectives.tokens import TokenLoss, Tokens


def token_loss(tokens: Tokens, grpo: GrpoSection) -> TokenLoss:
    """Compute max(-s A, -clip(s) A) at each token of a sequence, s = exp(mean over its tokens of log rho).

    d s / d log pi_t is s / length at each of its tokens. The loss stands at all of them with one weight: together they
    have the gradient of log s = log pi_t + constant at each token. So the mean itself needs no gradient, and its sum
    over context-parallel ranks no backward pass.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    mean = tokens.sequences.means(log_ratio)
    return clipped_ratio_loss(
        mean + (tokens.logprobs - tokens.logprobs.detach()),
        tokens.advantages,
        clip_low=grpo.clip_low,
        clip_high=grpo.clip_high,
        dual_clip=None,
    )
