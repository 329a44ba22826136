"""How token losses become one number: the weight of each sample's completion tokens in its optimizer update's loss.

Tokens are those of the policy: what `Samples.loss_mask` masks is in no loss and in no denominator.
Every aggregation is a sum over tokens of `weight * token loss`, where the weights hold the *global* denominators of the
update: so micro-batches and data-parallel ranks add up to the same loss and the same gradient however it is cut.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tandem_config.schema import GrpoSection
from trainer_service.micro_batches.samples import FloatArray, Samples

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]


def update_weights(samples: Samples, grpo: GrpoSection) -> FloatArray:
    """Compute the weight of each sample, [S]: denominators count masked samples of the update, whose weight is 0.

    The sequences of an episode are one sample here, with the tokens of all.
    """
    weights = np.zeros(len(samples), np.float32)
    for update in np.unique(samples.update_index):
        rows = samples.of_update(int(update))
        _, episode = np.unique(samples.episode[rows], return_inverse=True)
        lengths = torch.from_numpy(np.bincount(episode, samples.counted_lengths[rows]).astype(np.int64))
        found = sample_weights(lengths, grpo.aggregation, max_new_tokens=grpo.max_new_tokens)
        weights[rows] = found.numpy()[episode]
    return np.where(samples.trainable, weights, np.float32(0))


def sample_weights(completion_lengths: Tensor, aggregation: Aggregation, *, max_new_tokens: int) -> Tensor:
    """Compute the weight of a completion token of each sample; all samples of the update count, trainable or not.

    token-mean: 1 / (tokens of the update). seq-mean-token-mean: 1 / (S * the sample's tokens). seq-mean-token-sum:
    1 / S. dr-grpo: 1 / (S * max_new_tokens), a constant length normaliser.

    Args:
        completion_lengths: [S] tokens of the policy, of the *whole* update, all data-parallel ranks and micro-batches.
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
