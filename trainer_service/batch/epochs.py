"""The order of a step's samples in its second and later passes over them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer_service.batch.samples import Samples


def reordered(samples: Samples, num_updates: int, key: Sequence[int]) -> Samples:
    """Assign samples to updates anew, at random, in shares that differ by at most one sample.

    Every rank, and a run that resumes, gets the same order from the same key.

    Args:
        num_updates: of the epoch, at most as many as samples.
        key: numbers that are not negative: the run's seed, the number of the step and of the epoch.
    """
    update_index = np.empty_like(samples.update_index)
    order = np.random.default_rng(key).permutation(len(samples))
    for update, rows in enumerate(np.array_split(order, num_updates)):
        update_index[rows] = update
    return replace(samples, update_index=update_index)
