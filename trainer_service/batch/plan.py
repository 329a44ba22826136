"""Plans a step: which samples only go forward and which are trained on, as micro-batches of this data-parallel rank."""

from dataclasses import dataclass

import numpy as np

from tandem_config.schema import GrpoSection
from trainer_service.batch.cuts import cut, deal
from trainer_service.batch.padded import Padded, context_share, pad
from trainer_service.batch.samples import BoolArray, IntArray, Samples
from weightsync.layouts.layout import Parallel


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """This rank's place in the parallel layout, and the limits of its micro-batches."""

    data_rank: int
    data_parallel: int
    pipeline_parallel: int
    width_multiple: int  # S must divide by this: TP under sequence parallelism, 2 * CP under context parallelism
    max_tokens: int
    context_rank: int = 0
    context_parallel: int = 1
    # The number of micro-batches is a multiple of this: of the stages, under virtual pipeline parallelism.
    count_multiple: int = 1
    # All data-parallel ranks run equally many micro-batches: their experts exchange tokens in each.
    in_step: bool = False

    @classmethod
    def of(
        cls, parallel: Parallel, *, sequence_parallel: bool, max_tokens: int, data_rank: int, context_rank: int
    ) -> "RankShare":
        """Derive the limits from the parallel sizes."""
        experts, model = parallel.expert * parallel.expert_tensor, parallel.tensor * parallel.context
        return cls(
            data_rank=data_rank,
            data_parallel=parallel.data,
            pipeline_parallel=parallel.pipeline,
            width_multiple=(parallel.tensor if sequence_parallel else 1)
            * (2 * parallel.context if parallel.context > 1 else 1),
            max_tokens=max_tokens,
            context_rank=context_rank,
            context_parallel=parallel.context,
            count_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
            # else every expert group lies within one data-parallel rank
            in_step=parallel.data > 1 and model % experts != 0,
        )


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Micro-batches of this data-parallel rank.

    Attributes:
        measured: run forward without gradients at the start of the step, for log-probs and entropies of the policy that
            the step starts from.
        updates: by optimizer update; empty where no sample of the update has a gradient.
    """

    measured: list[Padded]
    updates: list[list[Padded]]


def plan_step(samples: Samples, num_updates: int, grpo: GrpoSection, ranks: RankShare) -> StepPlan:
    """Plan a step.

    A sample has a gradient if it is trainable and its advantage is not 0 (or there is an entropy bonus or a KL term);
    the others are left out of training, which changes no result: they still count in the denominators. With recomputed
    old log-probs all samples are measured, except those of the first update that have a gradient: before the first
    optimizer step pi_old *is* pi_theta, so their training forward yields it.
    """
    active = has_gradient(samples, grpo)
    measured = np.zeros(len(samples), np.bool_)
    if grpo.old_logprobs == "recompute":
        measured = ~(active & (samples.update_index == 0))
    owner = deal(samples, active, ranks.data_parallel)
    return StepPlan(
        measured=_micro_batches(samples, measured, owner, ranks),
        updates=plan_updates(samples, num_updates, grpo, ranks),
    )


def plan_updates(samples: Samples, num_updates: int, grpo: GrpoSection, ranks: RankShare) -> list[list[Padded]]:
    """Plan the updates of one pass over the samples, as `StepPlan.updates`."""
    active = has_gradient(samples, grpo)
    owner = deal(samples, active, ranks.data_parallel)
    trained = [active & (samples.update_index == update) for update in range(num_updates)]
    # data-parallel ranks reduce gradients together, so a rank without samples runs a stand-in
    return [_micro_batches(samples, rows, owner, ranks, at_least=int(rows.any())) for rows in trained]


def has_gradient(samples: Samples, grpo: GrpoSection) -> BoolArray:
    """Return [S] whether a sample can change the weights."""
    if grpo.entropy_coefficient != 0 or grpo.kl_in_loss:
        return samples.trainable
    moving: BoolArray = samples.trainable & (samples.advantages != 0)
    return moving


def measure_all(samples: Samples, ranks: RankShare) -> list[Padded]:
    """Plan this rank's share of a forward pass over all samples."""
    owner = deal(samples, samples.trainable, ranks.data_parallel)
    return _micro_batches(samples, np.ones(len(samples), np.bool_), owner, ranks)


def _micro_batches(
    samples: Samples, chosen: BoolArray, owner: IntArray, ranks: RankShare, at_least: int = 0
) -> list[Padded]:
    """Pack the chosen samples of this rank, and add stand-ins up to the number that the ranks must agree on."""
    parts = _cut(samples, chosen & (owner == ranks.data_rank), ranks)
    count = max(at_least, len(parts))
    if ranks.in_step:
        others = range(ranks.data_parallel)
        count = max(count, *(len(_cut(samples, chosen & (owner == other), ranks)) for other in others))
    count = -(-count // ranks.count_multiple) * ranks.count_multiple
    batches = [pad(samples, part, multiple=ranks.width_multiple) for part in parts]
    if count > len(parts):
        rows = np.flatnonzero(chosen)
        shortest = rows[[np.argmin(samples.lengths[rows])]]
        stand_in = pad(samples, shortest, multiple=ranks.width_multiple, counted=False)
        batches += [stand_in] * (count - len(parts))
    if ranks.context_parallel == 1:
        return batches
    return [context_share(batch, ranks.context_rank, ranks.context_parallel) for batch in batches]


def _cut(samples: Samples, chosen: BoolArray, ranks: RankShare) -> list[IntArray]:
    rows = np.flatnonzero(chosen)
    return cut(rows, samples.lengths[rows], max_tokens=ranks.max_tokens, pipeline_parallel=ranks.pipeline_parallel)
