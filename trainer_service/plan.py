"""Which samples of a step go forward only and which are trained on, as micro-batches of this data-parallel rank."""

from dataclasses import dataclass

import numpy as np

from tandem_config.schema import GrpoSection
from trainer_service.cuts import cut, deal
from trainer_service.padded import Padded, pad
from trainer_service.samples import BoolArray, Samples


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank's place and what a micro-batch may be."""

    data_rank: int
    data_parallel: int
    pipeline_parallel: int
    width_multiple: int  # S must divide by this: TP under sequence parallelism, else 1
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Micro-batches of this data-parallel rank.

    measured: forward without gradients at the start of the step, for log-probs and entropies of the policy that the
    step starts from. updates: by optimizer update; empty where no sample of the update has a gradient.
    """

    measured: list[Padded]
    updates: list[list[Padded]]


def plan_step(samples: Samples, num_updates: int, grpo: GrpoSection, ranks: Ranks) -> StepPlan:
    """Lay a step out.

    A sample has a gradient if it is trainable and its advantage is not 0 (or there is an entropy bonus); the others
    are left out of training, which changes no number: they keep their place in the denominators. With recomputed old
    log-probs they go forward with the rest. The first update's samples do not: before the first optimizer step
    pi_old *is* pi_theta, so their training forward yields it.
    """
    active = has_gradient(samples, grpo)
    owner = deal(samples, active, ranks.data_parallel)
    mine = owner == ranks.data_rank
    measured = np.zeros(len(samples), np.bool_)
    if grpo.old_logprobs == "recompute":
        measured = ~(active & (samples.update_index == 0))
    trained = [active & (samples.update_index == update) for update in range(num_updates)]
    return StepPlan(
        measured=_cut_and_pad(samples, measured & mine, ranks),
        updates=[_with_stand_in(samples, rows, mine, ranks) for rows in trained],
    )


def has_gradient(samples: Samples, grpo: GrpoSection) -> BoolArray:
    """[S] whether a sample can change the weights."""
    if grpo.entropy_coefficient != 0:
        return samples.trainable
    return samples.trainable & (samples.advantages != 0)


def measure_all(samples: Samples, ranks: Ranks) -> list[Padded]:
    """This rank's share of all samples, for a forward pass."""
    owner = deal(samples, samples.trainable, ranks.data_parallel)
    return _cut_and_pad(samples, owner == ranks.data_rank, ranks)


def _cut_and_pad(samples: Samples, chosen: BoolArray, ranks: Ranks) -> list[Padded]:
    rows = np.flatnonzero(chosen)
    parts = cut(rows, samples.lengths[rows], max_tokens=ranks.max_tokens, pipeline_parallel=ranks.pipeline_parallel)
    return [pad(samples, part, multiple=ranks.width_multiple) for part in parts]


def _with_stand_in(samples: Samples, trained: BoolArray, mine: BoolArray, ranks: Ranks) -> list[Padded]:
    """Data-parallel ranks reduce gradients together, so a rank without samples runs one that does not count."""
    if trained.any() and not (trained & mine).any():
        return [pad(samples, np.flatnonzero(trained)[:1], multiple=ranks.width_multiple, counted=False)]
    return _cut_and_pad(samples, trained & mine, ranks)
