"""KL and entropy in the loss: values, gradients by finite differences, and where they count."""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from coordinator.learn.kl import KL_ESTIMATORS as OF_COORDINATOR
from tandem_config.schema import GrpoSection
from tests.unit.trainer.batches import random_samples
from tests.unit.trainer.objective_references import divergence
from trainer_service.megatron_engine.backend import MicroBatchTensors
from trainer_service.micro_batches.packed import pack
from trainer_service.objectives.aggregation import update_weights
from trainer_service.objectives.kl import KL_ESTIMATORS, kl_estimate
from trainer_service.step.token_loss import SUMS, TokenState

TOKENS, VOCABULARY = 40, 11
every_estimator = pytest.mark.parametrize("estimator", KL_ESTIMATORS)


def random_logprobs(seed: int, size: int = TOKENS) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(-2, 0.7, size).clip(max=-0.01))


@every_estimator
def test_estimates_are_those_of_the_note(estimator: str) -> None:
    new, reference = random_logprobs(0), random_logprobs(1)
    expected = divergence(new.numpy(), reference.numpy(), estimator)
    np.testing.assert_allclose(kl_estimate(new, reference, estimator), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(OF_COORDINATOR[estimator]((reference - new).numpy()), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("ratio", "k1", "k2", "k3"),
    [
        (1.0, 0.0, 0.0, 0.0),
        (2.0, -np.log(2), np.log(2) ** 2 / 2, 1 - np.log(2)),
        (0.5, 0.6931472, 0.2402265, 0.1931472),
    ],
)
def test_by_hand(ratio: float, k1: float, k2: float, k3: float) -> None:
    """ratio: reference / policy."""
    new = torch.tensor([-1.0], dtype=torch.float64)
    names, of_ratio = ("k1", "k2", "k3"), np.array([np.log(ratio)])
    assert [kl_estimate(new, new + np.log(ratio), name).item() for name in names] == pytest.approx([k1, k2, k3])
    assert [OF_COORDINATOR[name](of_ratio).item() for name in names] == pytest.approx([k1, k2, k3])


def test_k1_and_k3_have_the_divergence_as_their_mean() -> None:
    """Over all tokens of a distribution, weighted by their probabilities; k2 only nearly."""
    p, q = (torch.from_numpy(np.random.default_rng(seed).normal(size=9)).log_softmax(0) for seed in (0, 1))
    true = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        assert (p.exp() * kl_estimate(p, q, estimator)).sum().item() == pytest.approx(true.item(), rel=1e-12)


@every_estimator
def test_far_policies_have_a_finite_divergence(estimator: str) -> None:
    new = torch.tensor([-500.0, -0.1, 0.0]).requires_grad_()
    found = kl_estimate(new, torch.tensor([-0.1, -500.0, -torch.inf]), estimator)
    found.sum().backward()
    assert new.grad is not None
    assert bool(torch.isfinite(found).all() and torch.isfinite(new.grad).all())


def test_every_choice_is_registered() -> None:
    choices = get_args(GrpoSection.model_fields["kl_estimator"].annotation)
    assert tuple(KL_ESTIMATORS) == tuple(OF_COORDINATOR) == choices


class Batch:
    """A batch whose logits are the parameters, all in float64: loss as TokenState computes it, and as defined here."""

    def __init__(self, grpo: GrpoSection, **changes: Any) -> None:
        self.grpo, self.samples = grpo, random_samples(12, updates=1, seed=4, **changes)
        self.samples.trainable[3] = False
        size = self.samples.num_completion_tokens
        random = np.random.default_rng(5)
        self.logits = random.normal(size=(size, VOCABULARY))
        self.targets = random.integers(0, VOCABULARY, size)
        self.state = TokenState.of(self.samples, grpo, torch.device("cpu"))
        now = self.both(torch.from_numpy(self.logits))[0]
        self.state.old_logprobs = now + torch.from_numpy(random.normal(0, 0.1, size))
        self.state.reference_logprobs = now + torch.from_numpy(random.normal(0, 0.5, size))
        self.state.advantages, self.state.weights = self.state.advantages.double(), self.state.weights.double()
        self.state.measures_old = False

    def both(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, torch.from_numpy(self.targets)[:, None])[:, 0]
        return chosen, -(logprobs.exp() * logprobs).sum(-1)

    def loss(self, logits: Tensor, rows: list[int] | None = None) -> Tensor:
        """The loss of a micro-batch of some samples, or of all."""
        packed = pack(self.samples, np.arange(len(self.samples)) if rows is None else np.array(rows))
        index = torch.from_numpy(packed.token_index)
        none: Any = torch.zeros(0)  # the loss reads none of these
        batch = MicroBatchTensors(
            input_ids=none,
            position_ids=none,
            positions=none,
            targets=none,
            token_index=index,
            packing=none,
            counted=True,
        )
        logprobs, entropies = self.both(logits)
        return self.state.loss(batch, logprobs[index], entropies[index])

    def expected(self, logits: np.ndarray[Any, Any]) -> float:
        """The definition in NumPy: probabilities, and sums over samples and tokens."""
        weights = self.samples.per_token(update_weights(self.samples, self.grpo)).astype(float)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        new = np.log(p[np.arange(len(p)), self.targets])
        ratio = np.exp(new) / np.exp(self.state.old_logprobs.numpy())
        a = self.samples.per_token(self.samples.advantages).astype(float)
        bounded = np.clip(ratio, 1 - self.grpo.clip_low, 1 + self.grpo.clip_high)
        losses = -np.minimum(ratio * a, bounded * a)
        losses += self.grpo.entropy_coefficient * (p * np.log(p)).sum(-1)
        reference = self.state.reference_logprobs.numpy()
        losses += self.grpo.kl_coefficient * divergence(new, reference, self.grpo.kl_estimator)
        return float((weights * losses).sum())


TERMS = [
    *({"kl_coefficient": 0.3, "kl_estimator": estimator} for estimator in KL_ESTIMATORS),
    {"entropy_coefficient": 0.2},
    {"entropy_coefficient": -0.2, "kl_coefficient": 0.1, "aggregation": "seq-mean-token-mean"},
    {"kl_coefficient": 0.1, "aggregation": "dr-grpo", "max_new_tokens": 8},
]


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_loss_and_gradient_are_those_of_the_definition(terms: dict[str, Any]) -> None:
    batch = Batch(GrpoSection(**terms))
    logits = torch.from_numpy(batch.logits.copy()).requires_grad_()
    loss = batch.loss(logits)
    loss.backward()
    assert logits.grad is not None
    assert loss.item() == pytest.approx(batch.expected(batch.logits), abs=1e-12)
    step = 1e-5
    for place in [(token, token % VOCABULARY) for token in range(0, len(batch.logits), 3)]:
        moved = [batch.logits.copy(), batch.logits.copy()]
        moved[0][place] += step
        moved[1][place] -= step
        slope = (batch.expected(moved[0]) - batch.expected(moved[1])) / (2 * step)
        assert logits.grad[place].item() == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_micro_batches_and_their_order_do_not_matter(terms: dict[str, Any]) -> None:
    batch, found = Batch(GrpoSection(**terms)), []
    for parts in ([list(range(12))], [[11, 0, 5], [1, 2, 3, 4], [10, 9], [8, 7, 6]]):
        logits = torch.from_numpy(batch.logits.copy()).requires_grad_()
        losses = torch.stack([batch.loss(logits, rows) for rows in parts])
        losses.sum().backward()
        found.append((losses.sum().detach(), logits.grad, batch.state.take_sums()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_kl_term_is_reported_apart() -> None:
    with_kl, without = Batch(GrpoSection(kl_coefficient=0.3, kl_estimator="k2")), Batch(GrpoSection())
    losses = [batch.loss(torch.from_numpy(batch.logits)).item() for batch in (with_kl, without)]
    sums = dict(zip(SUMS, with_kl.state.take_sums().tolist(), strict=True))
    assert sums["kl_loss"] == pytest.approx(losses[0] - losses[1])
    k3 = divergence(
        with_kl.both(torch.from_numpy(with_kl.logits))[0].numpy(), with_kl.state.reference_logprobs.numpy(), "k3"
    )
    assert sums["kl_reference"] == pytest.approx(k3.sum())
    assert dict(zip(SUMS, without.state.take_sums().tolist(), strict=True))["kl_reference"] == 0


def test_no_correction_weights_the_kl_term() -> None:
    corrected = Batch(GrpoSection(kl_coefficient=0.3, correction="mis", correction_high=1.0, correction_low=0.999))
    corrected.state.rollout_logprobs = corrected.state.old_logprobs - 1.0  # every weight is 0
    loss = corrected.loss(torch.from_numpy(corrected.logits)).item()
    sums = dict(zip(SUMS, corrected.state.take_sums().tolist(), strict=True))
    assert loss == pytest.approx(sums["kl_loss"])
    assert loss > 0
