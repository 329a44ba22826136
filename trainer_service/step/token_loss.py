"""The state of every completion token during a step, as [T] tensors on the device, and sums for the step's metrics."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem_config.schema import GrpoSection
from trainer_service.micro_batches.samples import Samples
from trainer_service.objectives.aggregation import update_weights
from trainer_service.objectives.corrections import correct
from trainer_service.objectives.kl import kl_estimate
from trainer_service.objectives.policy import OBJECTIVES
from trainer_service.objectives.step_metrics import count_by_size, empty_counts
from trainer_service.objectives.tokens import Sequences, Tokens
from trainer_service.step.backend import MicroBatch

# What is summed over tokens that were measured, whether or not they are trained on.
MEASURED_SUMS = ("measured_tokens", "compared_tokens", "entropy", "logprob_abs_diff")
# Order of the values in the vector that is summed over ranks.
SUMS = (
    "loss", "trained_tokens", "ratio", "kl_old", "clipped_low", "clipped_high", "correction_weight",
    "correction_outside", "measured_tokens", "compared_tokens", "entropy", "logprob_abs_diff", "not_finite",
    "kl_reference", "kl_loss",
)  # fmt: skip


@dataclass(kw_only=True)
class TokenState:
    """[T] tensors of one step. `weights` belong to the current update and are 0 for tokens in no loss.

    Masked tokens (`Samples.loss_mask`) are in no micro-batch's `token_index`: what is here of them is never read.
    `rollout_logprobs` are NaN where the engine's are not finite: such a token is compared with nothing, and its
    correction weight is 1. As pi_old (old_logprobs: rollout) they make the loss NaN, for on_non_finite.
    """

    grpo: GrpoSection
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    not_finite: Tensor  # bool
    measured: Tensor  # bool: old_logprobs holds this rank's own result
    owner: Tensor  # index of the token's sample
    lengths: Tensor  # [S] completion tokens of each sample that are the policy's
    # of the reference policy, and where it holds this rank's own result
    reference_logprobs: Tensor
    reference_measured: Tensor  # bool
    context_group: dist.ProcessGroup | None = None  # the ranks that share a sample's tokens; None: they have one
    # the ranks that may train on what this one has measured; None: this rank alone
    share_group: dist.ProcessGroup | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    abs_diff_max: Tensor = field(default_factory=lambda: torch.zeros(()))
    abs_diff_counts: Tensor = field(default_factory=lambda: empty_counts(None))  # of the same differences, by size
    measures_old: bool = True  # the policy is still the one that the step started from

    @classmethod
    def of(
        cls,
        samples: Samples,
        grpo: GrpoSection,
        device: torch.device,
        context_group: dist.ProcessGroup | None = None,
        share_group: dist.ProcessGroup | None = None,
    ) -> "TokenState":
        """Make the state at the start of a step."""
        engine = np.where(samples.engine_not_finite, np.float32(np.nan), samples.rollout_logprobs)
        rollout = torch.from_numpy(engine).to(device)
        owner = samples.per_token(np.arange(len(samples)))
        return cls(
            grpo=grpo,
            rollout_logprobs=rollout,
            old_logprobs=rollout.clone(),
            advantages=torch.from_numpy(samples.per_token(samples.advantages)).to(device),
            weights=torch.from_numpy(samples.per_token(update_weights(samples, grpo))).to(device),
            not_finite=torch.zeros(rollout.shape, dtype=torch.bool, device=device),
            measured=torch.zeros(rollout.shape, dtype=torch.bool, device=device),
            owner=torch.from_numpy(owner).to(device),
            lengths=torch.from_numpy(samples.counted_lengths).to(device),
            reference_logprobs=torch.zeros_like(rollout),
            reference_measured=torch.zeros(rollout.shape, dtype=torch.bool, device=device),
            context_group=context_group,
            share_group=share_group,
            abs_diff_max=torch.zeros((), device=device),
            abs_diff_counts=empty_counts(device),
        )

    def measure(self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> None:
        """Record log-probs [t] and entropies [t] of the policy that the step started from."""
        index = batch.token_index
        if index.numel() == 0:
            return
        if self.grpo.old_logprobs == "recompute":
            self.old_logprobs[index] = logprobs
            self.measured[index] = True
        # what is not finite is counted apart (on_non_finite: skip continues)
        finite, rollout = torch.isfinite(logprobs), self.rollout_logprobs[index]
        compared = finite & torch.isfinite(rollout)
        difference = torch.where(compared, logprobs - rollout, 0.0).abs()
        self.abs_diff_max = torch.maximum(self.abs_diff_max, difference.amax())
        count_by_size(difference, compared, self.abs_diff_counts)
        self._add("measured_tokens", finite)
        self._add("compared_tokens", compared)
        self._add("logprob_abs_diff", difference)
        self._add("entropy", torch.where(finite, entropies, 0.0))
        self._note_not_finite(index, logprobs)

    def measure_reference(self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> None:
        """Record log-probs [t] of the reference policy."""
        self.reference_logprobs[batch.token_index] = logprobs
        self.reference_measured[batch.token_index] = True

    def share_measured(self) -> None:
        """Share log-probs with all ranks that may train on them.

        These are several where a sample, or a part of it, is not on the same rank in every pass.
        """
        self.old_logprobs = self._shared(self.old_logprobs, self.measured)
        if self.grpo.kl_in_loss:
            self.reference_logprobs = self._shared(self.reference_logprobs, self.reference_measured)

    def begin_epoch(self, samples: Samples) -> None:
        """Begin another pass over the samples, with other updates."""
        self.share_measured()
        weights = update_weights(samples, self.grpo)
        self.weights = torch.from_numpy(samples.per_token(weights)).to(self.weights.device)

    def forgive(self) -> None:
        """Forget which tokens were not finite, and how many: only later ones count."""
        self.not_finite.zero_()
        self.sums.pop("not_finite", None)

    def _shared(self, logprobs: Tensor, measured: Tensor) -> Tensor:
        if self.share_group is None:
            return logprobs
        both = torch.stack([torch.where(measured, logprobs, 0.0), measured.float()])
        dist.all_reduce(both, group=self.share_group)
        return torch.where(both[1] > 0, both[0], logprobs)

    def loss(self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """Compute a micro-batch's part of the update's loss; scalar, differentiable."""
        if not batch.counted:
            return logprobs.sum() * 0.0
        if self.measures_old:
            self.measure(batch, logprobs.detach(), entropies.detach())
        index, grpo = batch.token_index, self.grpo
        tokens = self._tokens(index, logprobs)
        found = OBJECTIVES[grpo.objective](tokens, grpo)
        loss = found.loss
        if grpo.correction != "none":
            correction = correct(tokens, grpo)
            self._add("correction_weight", correction.weights)
            self._add("correction_outside", correction.outside)
            loss = loss * correction.weights
        if grpo.entropy_coefficient != 0:
            loss = loss - grpo.entropy_coefficient * entropies
        if grpo.kl_in_loss:
            loss = loss + self._kl_loss(index, logprobs)
        self._count("trained_tokens", index.numel())
        self._add("ratio", found.ratio)
        self._add("kl_old", kl_estimate(tokens.old_logprobs, logprobs.detach()))
        self._add("clipped_low", found.clipped_low)
        self._add("clipped_high", found.clipped_high)
        self._note_not_finite(index, loss.detach())
        total = (self.weights[index] * loss).sum()
        self._add("loss", total.detach())
        return total

    def _kl_loss(self, index: Tensor, logprobs: Tensor) -> Tensor:
        """Compute the part of the loss that keeps the policy near the reference, [t]; no correction weights it."""
        reference, grpo = self.reference_logprobs[index], self.grpo
        loss = grpo.kl_coefficient * kl_estimate(logprobs, reference, grpo.kl_estimator)
        self._add("kl_reference", kl_estimate(logprobs.detach(), reference))
        self._add("kl_loss", self.weights[index] * loss.detach())
        return loss

    def _tokens(self, index: Tensor, logprobs: Tensor) -> Tokens:
        old, rollout = self.old_logprobs[index], self.rollout_logprobs[index]
        return Tokens(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=torch.where(torch.isfinite(rollout), rollout, old),
            advantages=self.advantages[index],
            sequences=Sequences(owner=self.owner[index], lengths=self.lengths, add_ranks=self._add_ranks),
        )

    def _add_ranks(self, sums: Tensor) -> None:
        if self.context_group is not None:
            dist.all_reduce(sums, group=self.context_group)

    def _note_not_finite(self, index: Tensor, values: Tensor) -> None:
        bad = ~torch.isfinite(values)
        self.not_finite[index] |= bad
        self._add("not_finite", bad)

    def _add(self, name: str, values: Tensor) -> None:
        total = values.sum(dtype=torch.float64)
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def _count(self, name: str, amount: int) -> None:
        self._add(name, torch.full((), amount, device=self.weights.device))  # torch.tensor would wait for the GPU

    def take_sums(self) -> Tensor:
        """Return the sums of the update, [len(SUMS)] float64, and reset them."""
        zero = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        out = torch.stack([self.sums.get(name, zero) for name in SUMS])
        self.sums = {}
        return out
