"""The order of a step's samples in its second and later passes over them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from trainer_service.micro_batches.samples import Samples


def reordered(
    samples: Samples, num_updates: int, key: Sequence[int], divide: Literal["samples", "prompts"] = "samples"
) -> Samples:
    """Assign samples to updates anew, at random, in shares that differ by at most one sample (one prompt).

    Every rank, and a run that resumes, gets the same order from the same key.

    Args:
        num_updates: of the epoch, at most as many as samples.
        divide: what is divided; samples, if there are fewer prompts than updates.
        key: numbers that are not negative: the run's seed, the number of the step and of the epoch.
    """
    together = np.arange(len(samples))
    if divide == "prompts" and samples.prompt_index.max() + 1 >= num_updates:
        together = samples.prompt_index
    updates = np.empty(int(together.max()) + 1, np.int64)
    order = np.random.default_rng(key).permutation(updates.size)
    for update, numbers in enumerate(np.array_split(order, num_updates)):
        updates[numbers] = update
    return replace(samples, update_index=updates[together])
