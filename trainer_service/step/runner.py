"""Runs a GRPO step on this rank: old log-probs, those of the reference, then the updates of each epoch.

An update is forward, backward, finiteness check and AdamW.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from servicekit.errors import NotFinite
from servicekit.logs import get_logger
from servicekit.stopwatch import Stopwatch
from tandem_config.schema import GrpoSection
from trainer_service.engine import StepResult
from trainer_service.measure.flops import FlopCosts
from trainer_service.measure.meter import StepMeter
from trainer_service.micro_batches.plan import RankShare, measure_all, plan_step, plan_updates
from trainer_service.micro_batches.samples import FloatArray, Samples, reordered
from trainer_service.objectives.step_metrics import quantile_of, step_metrics
from trainer_service.step.agreement import RankAgreement
from trainer_service.step.backend import B, StepBackend
from trainer_service.step.reference import ReferencePolicy
from trainer_service.step.token_loss import MEASURED_SUMS, SUMS, TokenState

MAX_NAMED_SAMPLES = 16

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepRunner(Generic[B]):
    """Runs GRPO steps, and forward passes alone."""

    backend: StepBackend[B]
    grpo: GrpoSection
    ranks: RankShare
    device: torch.device
    meter: StepMeter
    costs: FlopCosts
    # of the name of each part
    around: Callable[[str], AbstractContextManager[object]]
    agreement: RankAgreement
    # None: no KL term in the loss
    reference: ReferencePolicy | None = None

    def run(
        self,
        samples: Samples,
        num_updates: int,
        learning_rate: float,
        *,
        order_key: Sequence[int] = (0,),
        skips_left: int = 0,
    ) -> StepResult:
        """Run a step; every rank must call this with the same arguments.

        Args:
            num_updates: of an epoch.
            order_key: what the order of the second and later epochs depends on.
            skips_left: updates that may be left out, with grpo.on_non_finite: skip.
        Raises: NotFinite: on every rank; weights and AdamW's state are restored.
        """
        self.meter.begin()
        watch, grpo, backend = Stopwatch(self.around), self.grpo, self.backend
        with watch.part("pack"):
            plan = plan_step(samples, num_updates, grpo, self.ranks)
            state = TokenState.of(samples, grpo, self.device, backend.token_group(), self._share_group)
            measured, updates = backend.load(plan.measured), [backend.load(rows) for rows in plan.updates]
            if num_updates * grpo.epochs > 1:
                backend.remember()
            self.agreement.meet()  # page-locked memory, a profiler: the first time they take a rank long
        with watch.part("old_logprobs"):
            backend.measure(measured, state.measure)
        if self.reference is not None:
            with watch.part("reference"), self.reference.in_place():
                for batches in updates:
                    backend.measure(batches, state.measure_reference)
        with watch.part("old_logprobs"):
            state.share_measured()
        if grpo.on_non_finite == "skip":
            state.forgive()  # the update whose loss has such a token will show it
        done = _Done(learning_rate=learning_rate, skips_left=skips_left)
        for epoch in range(grpo.epochs):
            if epoch > 0:
                with watch.part("pack"):
                    samples = reordered(samples, num_updates, [*order_key, epoch], grpo.updates_divide)
                    plans = plan_updates(samples, num_updates, grpo, self.ranks)
                    updates = [backend.load(rows) for rows in plans]
                    state.begin_epoch(samples)
            for update, batches in enumerate(updates):
                self._update(batches, state, done, (samples, update), watch)
        with watch.part("optimizer"):
            backend.gather()  # before anything but a forward pass reads parameters: publishing, saving, a reference
        metrics = self._metrics(done, state, samples)
        metrics |= {"packing_efficiency": plan.packing_efficiency, "prompt_sharing": plan.prompt_sharing}
        flops = plan.flops(samples, self.costs, epochs=grpo.epochs, reference=self.reference is not None)
        tokens = int(samples.lengths.sum())
        performance = self.meter.metrics(tokens=tokens, flops=flops, seconds=watch.total_s())
        return StepResult(metrics=metrics, performance=performance, seconds=watch.parts)

    def logprobs(self, samples: Samples) -> tuple[FloatArray, FloatArray]:
        """Compute log-probs and entropies of all completion tokens by forward passes; see `TrainerEngine.logprobs`."""
        out = torch.zeros(2, samples.num_completion_tokens, device=self.device)

        def record(batch: B, logprobs: Tensor, entropies: Tensor) -> None:
            out[0, batch.token_index] = logprobs
            out[1, batch.token_index] = entropies

        self.backend.measure(self.backend.load(measure_all(samples, self.ranks)), record)
        if not self.backend.counts:
            out.zero_()
        dist.all_reduce(out)
        logprobs, entropies = out.cpu().numpy().astype(np.float32)
        return logprobs, entropies

    def _metrics(self, done: "_Done", state: TokenState, samples: Samples) -> dict[str, float]:
        dist.all_reduce(state.abs_diff_max, dist.ReduceOp.MAX)
        largest = float(state.abs_diff_max)
        if not self.backend.counts:
            state.abs_diff_counts.zero_()
        dist.all_reduce(state.abs_diff_counts)
        return step_metrics(
            torch.stack(done.sums).cpu().numpy(),
            SUMS,
            done.norms,
            (quantile_of(state.abs_diff_counts.cpu().numpy(), largest), largest),
            done.learning_rate,
            samples,
            skipped_updates=done.skipped,
            kl_in_loss=self.grpo.kl_in_loss,
        )

    def _update(
        self,
        batches: list[B],
        state: TokenState,
        done: "_Done",
        of: tuple[Samples, int],
        watch: Stopwatch,
    ) -> None:
        """Run an optimizer update, or leave it out.

        Args:
            of: the samples, and the number of the update among theirs, for messages.
        """
        with watch.part("forward_backward"):
            self.backend.train(batches, state.loss)
        with watch.part("optimizer"):
            norm = self.backend.gradient_norm()
            sums = self._reduced(state.take_sums(), norm)
            if float(sums[SUMS.index("not_finite")]) > 0:
                self._leave_out(norm, state, done, of)
                for index, name in enumerate(SUMS):
                    if name not in MEASURED_SUMS:
                        sums[index] = 0.0
            else:
                self.backend.apply(norm, done.learning_rate)
                done.norms.append(norm)
            done.sums.append(sums)
        state.measures_old = False

    @property
    def _share_group(self) -> dist.ProcessGroup | None:
        """The ranks of which one measures a token and another may train on it.

        With several epochs a sample moves between copies of the model. Where prompts are shared, a token's place in its
        sequence depends on which samples of its prompt are in the pass. So does its context-parallel rank.
        """
        over_copies = self.grpo.epochs > 1 and self.ranks.data_parallel > 1
        over_chunks = self.ranks.share_prompts and self.ranks.context_parallel > 1
        if over_chunks and not over_copies:
            return self.backend.token_group()
        return self.backend.copies_group(with_token_group=over_chunks) if over_copies else None

    def _reduced(self, sums: Tensor, norm: float) -> Tensor:
        """Reduce the sums over all tokens of the update, which are on the last stage, equal on its tensor ranks."""
        if not self.backend.counts:
            sums.zero_()
        if not math.isfinite(norm):
            sums[SUMS.index("not_finite")] += 1
        dist.all_reduce(sums)
        return sums

    def _leave_out(self, norm: float, state: TokenState, done: "_Done", of: tuple[Samples, int]) -> None:
        """Leave an update out whose loss or gradient is not finite.

        Raises: NotFinite: that is not wanted, or the budget is spent; everything is as before the step.
        """
        bad = state.not_finite.to(torch.uint8)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        what = _describe(bad.cpu(), norm, *of, number=len(done.sums))
        if done.skipped >= done.skips_left:
            self.backend.gather()
            if done.sums:
                self.backend.restore()
            spent = self.grpo.on_non_finite == "skip"
            why = f"; grpo.non_finite_budget ({self.grpo.non_finite_budget}) is spent" if spent else ""
            raise NotFinite(f"{what}{why}; the weights are unchanged")
        done.skipped += 1
        state.forgive()
        if dist.get_rank() == 0:
            log.warning("optimizer update left out", reason=what, left=done.skips_left - done.skipped)


@dataclass(kw_only=True)
class _Done:
    """What is done of a step: sums of each update, norms of those that were not left out."""

    learning_rate: float
    skips_left: int
    skipped: int = 0
    sums: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def _describe(bad: Tensor, norm: float, samples: Samples, update: int, *, number: int) -> str:
    """Name the samples with a log-prob or loss that is not finite, else the update whose gradient is not.

    Args:
        number: of the update in the step, over all epochs.
    """
    tokens = torch.nonzero(bad).flatten().numpy()
    owners = sorted(set((samples.completion_starts.searchsorted(tokens, side="right") - 1).tolist()))
    what = "loss"
    if not owners:
        owners, what = samples.of_update(update).tolist(), f"gradient (norm {norm})"
    names = ", ".join(samples.sample_ids[i] for i in owners[:MAX_NAMED_SAMPLES])
    more = f" and {len(owners) - MAX_NAMED_SAMPLES} more" if len(owners) > MAX_NAMED_SAMPLES else ""
    return f"the {what} of update {number} is not finite; samples: {names}{more}"
