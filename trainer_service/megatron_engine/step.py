"""Runs a GRPO step on this rank: old log-probs, then per update forward, backward, finiteness check and AdamW."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from servicekit.errors import NotFinite
from servicekit.stopwatch import Stopwatch
from tandem_config.schema import GrpoSection
from trainer_service.batch.packed import Packed
from trainer_service.batch.plan import RankShare, plan_step
from trainer_service.batch.samples import Samples
from trainer_service.engine import StepResult
from trainer_service.megatron_engine.adam_state import AdamState
from trainer_service.megatron_engine.schedule import MicroBatchTensors, Schedule, to_device
from trainer_service.megatron_engine.token_state import SUMS, TokenState
from trainer_service.objectives.step_metrics import step_metrics

MAX_NAMED_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class StepRunner:
    """Runs GRPO steps with the parts of an engine."""

    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    adam: AdamState
    schedule: Schedule
    grpo: GrpoSection
    ranks: RankShare
    clip_grad: float
    device: torch.device

    def run(self, samples: Samples, num_updates: int, learning_rate: float) -> StepResult:
        """Run a step; every rank must call this with the same samples.

        Raises: NotFinite: on every rank; weights and AdamW's state are restored.
        """
        watch = Stopwatch()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with watch.part("pack"):
            plan = plan_step(samples, num_updates, self.grpo, self.ranks)
            state = TokenState.of(samples, self.grpo, self.device, self._context_group)
            measured, updates = self._load(plan.measured), [self._load(batches) for batches in plan.updates]
            if num_updates > 1:
                self.adam.remember()
        with watch.part("old_logprobs"):
            self.schedule.measure(measured, state.measure)
            state.share_measured()
        sums, norms = [], []
        for update, batches in enumerate(updates):
            with watch.part("forward_backward"):
                self._gradients(batches, state)
            with watch.part("optimizer"):
                norm = self._gradient_norm()
                sums.append(self._reduced(state.take_sums(), norm))
                self._check_finite(sums[-1], norm, samples, state, update)
                self._apply(norm)
            norms.append(norm)
            state.measures_old = False
        highest = self._reduced_max(state.abs_diff_max)
        return StepResult(
            metrics=step_metrics(torch.stack(sums).cpu().numpy(), SUMS, norms, highest, learning_rate, samples)
            | {"packing_efficiency": plan.packing_efficiency},
            seconds=watch.parts,
        )

    @property
    def _context_group(self) -> dist.ProcessGroup | None:
        return parallel_state.get_context_parallel_group() if self.ranks.context_parallel > 1 else None

    def _load(self, batches: list[Packed]) -> list[MicroBatchTensors]:
        return [to_device(batch, self.device) for batch in batches]

    def _gradients(self, batches: list[MicroBatchTensors], state: TokenState) -> None:
        """Compute the update's gradients in the model's main_grad buffers; zeros if no sample has a gradient."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.schedule.train(batches, state.loss)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # else its time would count as the optimizer's

    def _gradient_norm(self) -> float:
        """Compute the global L2 norm before clipping; NaN or inf if any gradient is."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def _reduced(self, sums: Tensor, norm: float) -> Tensor:
        """Reduce the sums over all tokens of the update, which are on the last stage, equal on its tensor ranks."""
        if not self._counts:
            sums.zero_()
        if not math.isfinite(norm):
            sums[SUMS.index("not_finite")] += 1
        dist.all_reduce(sums)
        return sums

    def _reduced_max(self, value: Tensor) -> float:
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    @property
    def _counts(self) -> bool:
        return bool(parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0)

    def _check_finite(self, sums: Tensor, norm: float, samples: Samples, state: TokenState, update: int) -> None:
        if float(sums[SUMS.index("not_finite")]) == 0:
            return
        if update > 0:
            self.adam.restore()
        bad = state.not_finite.to(torch.uint8)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        raise NotFinite(_describe(bad.cpu(), norm, samples, update))

    def _apply(self, norm: float) -> None:
        """Clip gradients by the global norm, then step AdamW."""
        for part in self.optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), self.clip_grad, norm)
        self.optimizer.step_with_ready_grads()


def _describe(bad: Tensor, norm: float, samples: Samples, update: int) -> str:
    """Name the samples with a log-prob or loss that is not finite, else the update whose gradient is not."""
    tokens = torch.nonzero(bad).flatten().numpy()
    owners = sorted(set((samples.completion_starts.searchsorted(tokens, side="right") - 1).tolist()))
    what = "loss"
    if not owners:
        owners, what = samples.of_update(update).tolist(), f"gradient (norm {norm})"
    names = ", ".join(samples.sample_ids[i] for i in owners[:MAX_NAMED_SAMPLES])
    more = f" and {len(owners) - MAX_NAMED_SAMPLES} more" if len(owners) > MAX_NAMED_SAMPLES else ""
    return f"the {what} of update {update} is not finite; samples: {names}{more}; the weights are unchanged"
