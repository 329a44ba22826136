"""Estimates of the divergence of two policies, per token (Schulman, Approximating KL Divergence, 2020)."""

from collections.abc import Callable, Mapping

from torch import Tensor

from trainer_service.objectives.clipping import MAX_LOG_RATIO

# Each from d = log other - log sampled. Samples are the first policy's: of the mean over them, k1 and k3 are unbiased.
KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda delta: -delta,
    "k2": lambda delta: 0.5 * delta.square(),
    "k3": lambda delta: delta.exp() - delta - 1,
}


def kl_estimate(sampled_logprobs: Tensor, other_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(sampled || other) per token by k1, k2 or k3, which is never negative; all [t].

    The two differ by 20 nats at most.

    >>> from torch import tensor
    >>> [round(kl_estimate(tensor([0.0]), tensor([2.0]).log(), name).item(), 4) for name in ("k1", "k2", "k3")]
    [-0.6931, 0.2402, 0.3069]
    """
    delta = (other_logprobs - sampled_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return KL_ESTIMATORS[estimator](delta)
