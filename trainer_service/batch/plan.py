"""Plans a step: which samples only go forward and which are trained on, as micro-batches of this data-parallel rank."""

from dataclasses import dataclass

import numpy as np

from tandem_config.schema import GrpoSection
from trainer_service.batch.cuts import cut, deal
from trainer_service.batch.packed import Packed, context_share, inputs, pack
from trainer_service.batch.samples import BoolArray, IntArray, Samples
from trainer_service.measure.flops import BACKWARD, FlopCosts
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """This rank's place in the parallel layout, and the limits of its micro-batches."""

    data_rank: int
    data_parallel: int
    pipeline_parallel: int
    max_tokens: int
    even_length: float  # see `deal`
    sequence_multiple: int = 1  # a sequence's tokens divide by this: 2 * CP under context parallelism
    row_multiple: int = 1  # a row's tokens divide by this: TP times the former, under sequence parallelism
    context_rank: int = 0
    context_parallel: int = 1
    # The number of micro-batches is a multiple of this: of the stages, under virtual pipeline parallelism.
    count_multiple: int = 1

    @classmethod
    def of(
        cls,
        parallel: Parallel,
        spec: ModelSpec,
        *,
        sequence_parallel: bool,
        max_tokens: int,
        data_rank: int,
        context_rank: int,
    ) -> "RankShare":
        """Derive the limits from the parallel sizes and the model."""
        chunks = 2 * parallel.context if parallel.context > 1 else 1
        return cls(
            data_rank=data_rank,
            data_parallel=parallel.data,
            pipeline_parallel=parallel.pipeline,
            max_tokens=max_tokens,
            even_length=FlopCosts.of(spec).even_length,
            sequence_multiple=chunks,
            row_multiple=chunks * (parallel.tensor if sequence_parallel else 1),
            context_rank=context_rank,
            context_parallel=parallel.context,
            count_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        )


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Micro-batches of this data-parallel rank.

    Attributes:
        measured: run forward without gradients at the start of the step, for log-probs and entropies of the policy that
            the step starts from.
        measures: [S] whether a sample is measured so.
        trains: [S] whether a sample is trained on, in each epoch.
        updates: by optimizer update; empty where no sample of the update has a gradient.
        packing_efficiency: the samples' tokens per token that goes through the model, in all passes of all ranks.
    """

    measured: list[Packed]
    measures: BoolArray
    trains: BoolArray
    updates: list[list[Packed]]
    packing_efficiency: float

    def flops(self, samples: Samples, costs: FlopCosts, *, epochs: int, reference: bool) -> float:
        """Count the FLOPs that all ranks together need for the step.

        Args:
            reference: the samples that are trained on go through the reference policy too.
        """

        def forward(chosen: BoolArray) -> float:
            return costs.forward(samples.prompt_lengths[chosen], samples.completion_lengths[chosen])

        return forward(self.measures) + (int(reference) + (1 + BACKWARD) * epochs) * forward(self.trains)


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
    owner = deal(samples, active, ranks.data_parallel, ranks.even_length)
    first = _cut(samples, measured, owner, ranks)
    others = _cut_updates(samples, num_updates, grpo, ranks)
    computed = sum(cut_pass.computed for cut_pass in (first, *others))
    return StepPlan(
        measured=_micro_batches(samples, first, ranks),
        measures=measured,
        trains=active,
        updates=[_micro_batches(samples, cut_pass, ranks) for cut_pass in others],
        packing_efficiency=sum(cut_pass.true for cut_pass in (first, *others)) / computed if computed else 1.0,
    )


def plan_updates(samples: Samples, num_updates: int, grpo: GrpoSection, ranks: RankShare) -> list[list[Packed]]:
    """Plan the updates of one pass over the samples, as `StepPlan.updates`."""
    return [_micro_batches(samples, cut_pass, ranks) for cut_pass in _cut_updates(samples, num_updates, grpo, ranks)]


def has_gradient(samples: Samples, grpo: GrpoSection) -> BoolArray:
    """Return [S] whether a sample can change the weights."""
    if grpo.entropy_coefficient != 0 or grpo.kl_in_loss:
        return samples.trainable
    moving: BoolArray = samples.trainable & (samples.advantages != 0)
    return moving


def measure_all(samples: Samples, ranks: RankShare) -> list[Packed]:
    """Plan this rank's share of a forward pass over all samples."""
    owner = deal(samples, samples.trainable, ranks.data_parallel, ranks.even_length)
    return _micro_batches(samples, _cut(samples, np.ones(len(samples), np.bool_), owner, ranks), ranks)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One pass over some samples, of all data-parallel ranks.

    Attributes:
        mine: samples of each micro-batch of this rank; none: a stand-in.
        stand_in: the sample of stand-ins, [1].
        true: the samples' tokens.
        computed: tokens of all rows, with padding and stand-ins.
    """

    mine: list[IntArray]
    stand_in: IntArray
    true: int
    computed: int


def _cut(samples: Samples, chosen: BoolArray, owner: IntArray, ranks: RankShare) -> _Pass:
    """Cut the chosen samples into micro-batches: equally many on all ranks, whose experts and gradients meet."""
    rows = np.flatnonzero(chosen)
    tokens = inputs(samples, np.arange(len(samples)), ranks.sequence_multiple)
    parts = cut(
        [rows[owner[rows] == rank] for rank in range(ranks.data_parallel)],
        tokens,
        max_tokens=ranks.max_tokens,
        pipeline_parallel=ranks.pipeline_parallel,
        count_multiple=ranks.count_multiple,
    )
    stand_in = rows[[np.argmin(samples.lengths[rows])]] if rows.size else rows
    sizes = [int(tokens[part if part.size else stand_in].sum()) for of_rank in parts for part in of_rank]
    return _Pass(
        mine=parts[ranks.data_rank],
        stand_in=stand_in,
        true=int(inputs(samples, rows).sum()),
        computed=sum(-(-size // ranks.row_multiple) * ranks.row_multiple for size in sizes),
    )


def _cut_updates(samples: Samples, num_updates: int, grpo: GrpoSection, ranks: RankShare) -> list[_Pass]:
    active = has_gradient(samples, grpo)
    owner = deal(samples, active, ranks.data_parallel, ranks.even_length)
    return [_cut(samples, active & (samples.update_index == update), owner, ranks) for update in range(num_updates)]


def _micro_batches(samples: Samples, found: _Pass, ranks: RankShare) -> list[Packed]:
    """Pack this rank's micro-batches of a pass."""
    return [_micro_batch(samples, part, found, ranks) for part in found.mine]


def _micro_batch(samples: Samples, part: IntArray, of: _Pass, ranks: RankShare) -> Packed:
    batch = pack(
        samples,
        part if part.size else of.stand_in,
        sequence_multiple=ranks.sequence_multiple,
        row_multiple=ranks.row_multiple,
        counted=part.size > 0,
    )
    return batch if ranks.context_parallel == 1 else context_share(batch, ranks.context_rank, ranks.context_parallel)
