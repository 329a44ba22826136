"""The weight of each sample's completion tokens in the loss of its own optimizer update."""

import numpy as np
import torch

from tandem_config.schema import GrpoSection
from trainer_service.batch.samples import FloatArray, Samples
from trainer_service.objectives.loss import sample_weights


def update_weights(samples: Samples, grpo: GrpoSection) -> FloatArray:
    """Compute the weight of each sample, [S]: denominators count masked samples of the update, whose weight is 0."""
    weights = np.zeros(len(samples), np.float32)
    for update in np.unique(samples.update_index):
        rows = samples.of_update(int(update))
        lengths = torch.from_numpy(samples.completion_lengths[rows])
        weights[rows] = sample_weights(lengths, grpo.aggregation, max_new_tokens=grpo.max_new_tokens).numpy()
    return np.where(samples.trainable, weights, np.float32(0))
