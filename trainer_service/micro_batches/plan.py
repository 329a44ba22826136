"""Plans a step: which samples only go forward and which are trained on, as micro-batches of this data-parallel rank."""

from dataclasses import dataclass

import numpy as np

from tandem_config.schema import GrpoSection
from trainer_service.measure.flops import BACKWARD, FlopCosts
from trainer_service.micro_batches.cuts import MICRO_BATCHES_PER_STAGE, MIN_TOKENS_TO_SPLIT, cut, deal
from trainer_service.micro_batches.groups import Groups, by_prompt, repeated, row_tokens, singles
from trainer_service.micro_batches.packed import PackedRow, context_share, inputs, pack
from trainer_service.micro_batches.samples import BoolArray, IntArray, Samples
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
    share_prompts: bool = False

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
        share_prompts: bool = False,
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
            share_prompts=share_prompts,
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
        packing_efficiency: the samples' tokens, after sharing prompts, per token that goes through the model, in all
            passes of all ranks.
        prompt_sharing: tokens that go through the model per token that would without shared prompts, padding left out.
        spared: lengths of the prompts that are not computed once more, in measuring and in an epoch's updates.
    """

    measured: list[PackedRow]
    measures: BoolArray
    trains: BoolArray
    updates: list[list[PackedRow]]
    packing_efficiency: float
    prompt_sharing: float
    spared: tuple[IntArray, IntArray]

    def flops(self, samples: Samples, costs: FlopCosts, *, epochs: int, reference: bool) -> float:
        """Count the FLOPs that all ranks together need for the step.

        Args:
            reference: the samples that are trained on go through the reference policy too.
        """

        def forward(chosen: BoolArray, spared: IntArray) -> float:
            lengths = (samples.prompt_lengths, samples.completion_lengths, samples.counted_lengths)
            whole = costs.forward(*(of_samples[chosen] for of_samples in lengths))
            return whole - costs.prompts(spared)

        measured, trained = forward(self.measures, self.spared[0]), forward(self.trains, self.spared[1])
        return measured + (int(reference) + (1 + BACKWARD) * epochs) * trained


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
    first = _cut(samples, measured, _owner(samples, active, ranks), ranks)
    others = _cut_updates(samples, num_updates, grpo, ranks)
    spared = (first.spared, np.concatenate([first.spared[:0], *(update.spared for update in others)]))
    whole, computed = (sum(getattr(cut_pass, name) for cut_pass in (first, *others)) for name in ("whole", "computed"))
    shared = whole - int(spared[0].sum() + spared[1].sum())
    return StepPlan(
        measured=_micro_batches(samples, first, ranks),
        measures=measured,
        trains=active,
        updates=[_micro_batches(samples, cut_pass, ranks) for cut_pass in others],
        packing_efficiency=shared / computed if computed else 1.0,
        prompt_sharing=shared / whole if whole else 1.0,
        spared=spared,
    )


def plan_updates(samples: Samples, num_updates: int, grpo: GrpoSection, ranks: RankShare) -> list[list[PackedRow]]:
    """Plan the updates of one pass over the samples, as `StepPlan.updates`."""
    return [_micro_batches(samples, cut_pass, ranks) for cut_pass in _cut_updates(samples, num_updates, grpo, ranks)]


def has_gradient(samples: Samples, grpo: GrpoSection) -> BoolArray:
    """Return [S] whether a sample can change the weights."""
    if grpo.entropy_coefficient != 0 or grpo.kl_in_loss:
        return samples.trainable
    moving: BoolArray = samples.trainable & (samples.advantages != 0)
    return moving


def measure_all(samples: Samples, ranks: RankShare) -> list[PackedRow]:
    """Plan this rank's share of a forward pass over all samples."""
    owner = _owner(samples, samples.trainable, ranks)
    return _micro_batches(samples, _cut(samples, np.ones(len(samples), np.bool_), owner, ranks), ranks)


def _owner(samples: Samples, active: BoolArray, ranks: RankShare) -> IntArray:
    return deal(samples, active, ranks.data_parallel, ranks.even_length, share_prompts=ranks.share_prompts)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One pass over some samples, of all data-parallel ranks.

    Attributes:
        mine: samples of each micro-batch of this rank; none: a stand-in.
        stand_in: the sample of stand-ins, [1].
        whole: the samples' tokens.
        spared: lengths of the prompts that are not computed once more, because they are shared.
        computed: tokens of all rows, with padding and stand-ins.
    """

    mine: list[IntArray]
    stand_in: IntArray
    whole: int
    spared: IntArray
    computed: int


def _cut(samples: Samples, chosen: BoolArray, owner: IntArray, ranks: RankShare) -> _Pass:
    """Cut the chosen samples into micro-batches: equally many on all ranks, whose experts and gradients meet."""
    rows = np.flatnonzero(chosen)
    shares = [_groups(samples, rows[owner[rows] == rank], ranks) for rank in range(ranks.data_parallel)]
    parts = cut(
        [share.tokens for share in shares],
        max_tokens=ranks.max_tokens,
        pipeline_parallel=ranks.pipeline_parallel,
        count_multiple=ranks.count_multiple,
    )
    of_ranks = [[share.take(part) for part in of_rank] for share, of_rank in zip(shares, parts, strict=True)]
    stand_in = rows[[np.argmin(samples.lengths[rows])]] if rows.size else rows
    sizes = [_tokens(samples, part if part.size else stand_in, ranks) for of_rank in of_ranks for part in of_rank]
    spared = [repeated(samples, part) for of_rank in of_ranks for part in of_rank] if ranks.share_prompts else []
    return _Pass(
        mine=of_ranks[ranks.data_rank],
        stand_in=stand_in,
        whole=int(inputs(samples, rows).sum()),
        spared=np.concatenate([rows[:0], *spared]),
        computed=sum(-(-size // ranks.row_multiple) * ranks.row_multiple for size in sizes),
    )


def _tokens(samples: Samples, rows: IntArray, ranks: RankShare) -> int:
    """Count the tokens of a row, but for padding at its end."""
    if ranks.share_prompts:
        return row_tokens(samples, rows, ranks.sequence_multiple)
    return int(inputs(samples, rows, ranks.sequence_multiple).sum())


def _groups(samples: Samples, rows: IntArray, ranks: RankShare) -> Groups:
    """Group a rank's samples of a pass: what is in a group goes through the model together."""
    if not ranks.share_prompts:
        return singles(samples, rows, ranks.sequence_multiple)
    multiple = ranks.sequence_multiple
    groups = by_prompt(samples, rows, ranks.max_tokens, multiple=multiple)
    if ranks.pipeline_parallel == 1:
        return groups
    # small enough for the micro-batches that keep all stages at work
    wanted = int(groups.tokens.sum()) // (MICRO_BATCHES_PER_STAGE * ranks.pipeline_parallel)
    return by_prompt(samples, rows, ranks.max_tokens, max(MIN_TOKENS_TO_SPLIT, wanted), multiple)


def _cut_updates(samples: Samples, num_updates: int, grpo: GrpoSection, ranks: RankShare) -> list[_Pass]:
    active = has_gradient(samples, grpo)
    owner = _owner(samples, active, ranks)
    return [_cut(samples, active & (samples.update_index == update), owner, ranks) for update in range(num_updates)]


def _micro_batches(samples: Samples, found: _Pass, ranks: RankShare) -> list[PackedRow]:
    """Pack this rank's micro-batches of a pass."""
    return [_micro_batch(samples, part, found, ranks) for part in found.mine]


def _micro_batch(samples: Samples, part: IntArray, of: _Pass, ranks: RankShare) -> PackedRow:
    batch = pack(
        samples,
        part if part.size else of.stand_in,
        share_prompts=ranks.share_prompts,
        sequence_multiple=ranks.sequence_multiple,
        row_multiple=ranks.row_multiple,
        counted=part.size > 0,
    )
    return batch if ranks.context_parallel == 1 else context_share(batch, ranks.context_rank, ranks.context_parallel)
