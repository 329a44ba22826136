"""Step 5, with `grpo.kl_in: reward`: what the divergence from the reference policy takes off rewards. Pure NumPy.

The reward of a completion becomes r - coefficient x the sum over its tokens of KL(pi_old || pi_ref). Baseline and
standard deviation come after it, as in verl (apply_kl_penalty) and TRL's RLOO. A group's members may be on any of the
trainer's ranks; here they are together, and advantages have one place. So the trainer only measures log-probs.

Legend: P prompts, G completions per prompt, S samples (those with a reward), T completion tokens of all of them; of
`delta_T` those that the policy has sampled.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from servicekit.errors import NotFinite
from tandem_clients.flow import Divergence, Sample, policy_tokens
from tandem_config.schema import GrpoSection

Array = NDArray[np.float64]
# As the trainer bounds it (objectives/clipping.py): e^20 is still finite in float32.
_MAX_LOG_RATIO = 20.0
_NAMED_SAMPLES = 5
# From d = log pi_ref - log pi_old; trainer_service/objectives/kl.py has the same for tensors.
KL_ESTIMATORS: Mapping[str, Callable[[Array], Array]] = {
    "k1": lambda delta_T: -delta_T,
    "k2": lambda delta_T: 0.5 * delta_T**2,
    "k3": lambda delta_T: np.exp(delta_T) - delta_T - 1,
}


def diverge(
    samples: Sequence[Sample],
    present_PG: NDArray[np.bool_],
    old_T: NDArray[np.float32],
    reference_T: NDArray[np.float32],
    grpo: GrpoSection,
    seconds: float,
) -> Divergence:
    """Compute the penalties of samples from their tokens' log-probs.

    Args:
        samples: S of them, in the order of `present_PG`.
        present_PG: [P, G] True: the sample has a reward.
        old_T, reference_T: log pi_old and log pi_ref, sample by sample; tokens that the policy has not sampled count
            nowhere, whatever is there.
    Raises: NotFinite: a log-prob is not; its sample is named.
    """
    sampled_T = np.asarray(policy_tokens(samples), np.bool_)
    delta_T = (reference_T.astype(np.float64) - old_T)[sampled_T].clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    lengths_S = np.array([sample.completion.num_sampled for sample in samples])
    starts_S = np.cumsum(lengths_S) - lengths_S
    kl_S = np.add.reduceat(KL_ESTIMATORS[grpo.kl_estimator](delta_T), starts_S)
    if not np.isfinite(kl_S).all():
        names = [samples[i].sample_id for i in np.flatnonzero(~np.isfinite(kl_S))[:_NAMED_SAMPLES]]
        raise NotFinite(f"KL to the reference policy is not finite; samples: {', '.join(names)}")
    penalties_PG = np.zeros(present_PG.shape)
    penalties_PG[present_PG] = grpo.kl_coefficient * kl_S
    metrics = {
        "kl_reference": float(KL_ESTIMATORS["k3"](delta_T).mean()),
        "kl_reward": float(grpo.kl_coefficient * kl_S.mean()),
    }
    return Divergence(penalties_PG=penalties_PG, metrics=metrics, seconds=seconds)
