"""Masked tokens: read by the model, and in no loss, gradient, denominator or metric."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tandem_config.schema import GrpoSection
from tests.integration.trainer.reference import masked
from tests.unit.trainer.batches import random_samples
from tests.unit.trainer.objective_references import divergence
from tests.unit.trainer.test_kl import VOCABULARY, Batch
from tests.unit.trainer.test_packing import ranks
from trainer_service.measure.flops import FlopCosts
from trainer_service.micro_batches.packed import context_share, pack
from trainer_service.micro_batches.plan import plan_step
from trainer_service.objectives.step_metrics import quantile_of, step_metrics
from trainer_service.step.token_loss import SUMS

Array = NDArray[np.float64]
BOUNDS = {"correction_low": 0.7, "correction_high": 1.6}
TERMS = {"entropy_coefficient": 0.2, "kl_coefficient": 0.3, "kl_estimator": "k3"}
SETTINGS: dict[str, dict[str, Any]] = {
    "token-mean": {"aggregation": "token-mean", "dual_clip": 1.5, "clip_high": 0.05},
    "seq-mean-token-mean, terms": {"aggregation": "seq-mean-token-mean", **TERMS},
    "seq-mean-token-sum, tis": {"aggregation": "seq-mean-token-sum", "correction": "tis", **BOUNDS},
    "dr-grpo, icepop": {"aggregation": "dr-grpo", "max_new_tokens": 8, "correction": "icepop", **BOUNDS},
    "gspo": {"objective": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 0.02, "clip_high": 0.05},
    "gspo, mis": {"objective": "gspo", "correction": "mis", "correction_level": "sequence", **BOUNDS},
    "gspo, tis": {"objective": "gspo", "correction": "tis", "correction_level": "geometric", **BOUNDS, **TERMS},
    "cispo": {"objective": "cispo", "clip_high": 0.05},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


class MaskedBatch(Batch):
    """A batch with masked tokens, whose old, rollout and reference log-probs are NaN, and the loss as verl has it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        mask = masked(random_samples(12, updates=1, seed=4)).loss_mask
        super().__init__(GrpoSection(**settings), loss_mask=mask)
        self.state.rollout_logprobs = self.state.old_logprobs + torch.linspace(-0.4, 0.4, mask.size)
        for values in (self.state.old_logprobs, self.state.rollout_logprobs, self.state.reference_logprobs):
            values[~torch.from_numpy(mask)] = torch.nan

    def padded(self, values: Any) -> Array:
        """[S, longest], 0 where nothing is."""
        lengths = self.samples.completion_lengths
        out = np.zeros((len(lengths), int(lengths.max())))
        out[np.arange(out.shape[1]) < lengths[:, None]] = values
        return out

    def reference(self, logits: Array, start: Array) -> float:
        """The loss by rows of padded sequences and a mask, as verl writes it. start: where gradients are taken."""
        grpo, rows = self.grpo, np.arange(len(logits))
        mask = self.padded(self.samples.loss_mask)
        p, at_start = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (logits, start))
        new, fixed = (self.padded(np.log(each[rows, self.targets])) for each in (p, at_start))
        states = (self.state.old_logprobs, self.state.rollout_logprobs, self.state.reference_logprobs)
        old, rollout, near = (self.padded(np.nan_to_num(each.numpy())) for each in states)
        advantage = self.samples.advantages.astype(float)[:, None]
        ratio, loss = np.exp(new - old), np.zeros(0)
        if grpo.objective == "gspo":
            ratio = np.exp(((new - old) * mask).sum(1) / mask.sum(1))[:, None] + np.zeros_like(new)
        if grpo.objective == "cispo":
            loss = -np.minimum(np.exp(fixed - old), 1 + grpo.clip_high) * advantage * new
        else:
            loss = np.maximum(-ratio * advantage, -ratio.clip(1 - grpo.clip_low, 1 + grpo.clip_high) * advantage)
        if grpo.dual_clip is not None:
            loss = np.where(advantage < 0, np.minimum(loss, -grpo.dual_clip * advantage), loss)
        loss = loss * self.weights((old - rollout) * mask, mask)
        loss = loss - grpo.entropy_coefficient * self.padded(-(p * np.log(p)).sum(-1))
        loss = loss + grpo.kl_coefficient * divergence(new, near, grpo.kl_estimator)
        return self.aggregate(loss * mask * self.samples.trainable[:, None], mask)

    def weights(self, difference: Array, mask: Array) -> Array:
        grpo, level = self.grpo, self.grpo.correction_level
        if level != "token":
            sums = difference.sum(1) / (1 if level == "sequence" else mask.sum(1))
            difference = sums[:, None] + np.zeros_like(mask)
        weight = np.exp(difference)
        if grpo.correction == "none":
            return np.ones_like(mask)
        inside = weight.clip(grpo.correction_low or 0.0, grpo.correction_high or np.inf)
        return inside if grpo.correction == "tis" else np.where(weight == inside, weight, 0.0)

    def aggregate(self, loss: Array, mask: Array) -> float:
        """verl's agg_loss; dr-grpo divides the sums by a constant."""
        if self.grpo.aggregation == "token-mean":
            return float(loss.sum() / mask.sum())
        if self.grpo.aggregation == "seq-mean-token-mean":
            return float((loss.sum(1) / mask.sum(1)).mean())
        constant = self.grpo.max_new_tokens if self.grpo.aggregation == "dr-grpo" else 1
        return float(loss.sum(1).mean() / constant)


@every_setting
def test_loss_and_gradient_are_those_of_a_masked_mean(settings: dict[str, Any]) -> None:
    batch = MaskedBatch(settings)
    logits = torch.from_numpy(batch.logits.copy()).requires_grad_()
    loss = batch.loss(logits)
    loss.backward()
    assert logits.grad is not None
    assert loss.item() == pytest.approx(batch.reference(batch.logits, batch.logits), rel=1e-6)
    step, counts = 1e-5, batch.samples.loss_mask
    assert not logits.grad[~torch.from_numpy(counts)].any()
    for place in [(token, token % VOCABULARY) for token in np.flatnonzero(counts)[::2].tolist()]:
        moved = [batch.logits.copy(), batch.logits.copy()]
        moved[0][place] += step
        moved[1][place] -= step
        slope = (batch.reference(moved[0], batch.logits) - batch.reference(moved[1], batch.logits)) / (2 * step)
        assert logits.grad[place].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


@every_setting
def test_micro_batches_of_masked_samples_add_up(settings: dict[str, Any]) -> None:
    batch, found = MaskedBatch(settings), []
    for parts in ([list(range(12))], [[11, 0, 5], [1, 2, 3, 4], [10, 9], [8, 7, 6]]):
        logits = torch.from_numpy(batch.logits.copy()).requires_grad_()
        losses = torch.stack([batch.loss(logits, rows) for rows in parts])
        losses.sum().backward()
        found.append((losses.sum().detach(), logits.grad, batch.state.take_sums()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_metrics_are_means_over_the_policy_s_tokens() -> None:
    batch = MaskedBatch({"kl_coefficient": 0.3, "old_logprobs": "recompute"})
    batch.state.measures_old = True
    logprobs, entropies = batch.both(torch.from_numpy(batch.logits))
    rollout, near = batch.state.rollout_logprobs.clone(), batch.state.reference_logprobs.numpy()
    batch.loss(torch.from_numpy(batch.logits))
    found = step_metrics(
        batch.state.take_sums()[None].numpy(),
        SUMS,
        [1.0],
        (0.5, float(batch.state.abs_diff_max)),
        0.1,
        batch.samples,
        kl_in_loss=True,
    )
    counts = batch.samples.loss_mask
    assert found["tokens"] == found["measured_tokens"] == found["trained_tokens"] == counts.sum() < counts.size
    assert found["entropy"] == pytest.approx(entropies.numpy()[counts].mean())
    difference = (logprobs - rollout).abs().numpy()[counts]
    assert found["logprob_abs_diff_mean"] == pytest.approx(difference.mean())
    assert found["logprob_abs_diff_max"] == pytest.approx(difference.max())
    assert found["logprob_abs_diff_p999"] == 0.5
    counted = batch.state.abs_diff_counts.numpy()
    assert counted.sum() == counts.sum()
    assert quantile_of(counted, 1e9) == pytest.approx(difference.max(), rel=0.022)  # of a few tokens
    assert found["ratio_mean"] == pytest.approx(1.0)
    assert found["kl_reference"] == pytest.approx(divergence(logprobs.numpy(), near, "k3")[counts].mean())


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_row_is_the_same_but_predicts_fewer_tokens(share_prompts: bool, multiple: int) -> None:
    plain = random_samples(8, prompt_lengths=np.full(8, 1), token_ids=np.zeros(0, np.int64), seed=3)
    plain = replace(plain, token_ids=np.arange(int(plain.lengths.sum())) % 2)
    samples, rows = masked(plain), np.array([5, 0, 7, 2, 3])
    whole, batch = (
        pack(each, rows, share_prompts=share_prompts, sequence_multiple=multiple) for each in (plain, samples)
    )
    counts = samples.loss_mask[whole.token_index]
    assert 0 < counts.sum() < counts.size
    for name in ("positions", "targets", "token_index"):
        assert getattr(batch, name).tolist() == getattr(whole, name)[counts].tolist()
    for name in ("input_ids", "position_ids", "lengths", "attended"):
        assert getattr(batch, name).tolist() == getattr(whole, name).tolist()
    np.testing.assert_equal(batch.keys, whole.keys)


def test_context_parallel_ranks_together_predict_the_policy_s_tokens_once() -> None:
    samples = masked(random_samples(9, seed=2))
    batch = pack(samples, np.arange(9), sequence_multiple=4)
    shares = [context_share(batch, rank, 2) for rank in (0, 1)]
    together = np.concatenate([share.token_index for share in shares])
    assert sorted(together.tolist()) == np.flatnonzero(samples.loss_mask).tolist()


def test_the_output_layer_s_flops_are_of_the_policy_s_tokens() -> None:
    samples = masked(random_samples(20, seed=1))
    plan = plan_step(samples, 2, GrpoSection(old_logprobs="rollout"), ranks())
    costs = FlopCosts(token=0.0, pair=0.0, completion=1.0)
    assert plan.flops(samples, costs, epochs=1, reference=False) == 3 * samples.loss_mask.sum()
