"""The loss: values from the papers' formulas, and invariance to how an update is cut."""

from typing import Any, get_args

import pytest
import torch

from trainer_service.objectives.loss import Aggregation, clipped_ratio_loss, importance_weights, kl_k3, sample_weights

LN2 = 0.6931472


def losses(rho: list[float], advantages: list[float], **options: float | None) -> list[float]:
    settings: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, **options}
    new = torch.tensor(rho).log()
    out = clipped_ratio_loss(new, torch.zeros_like(new), torch.tensor(advantages), **settings)
    each: list[float] = out.loss.tolist()
    return each


@pytest.mark.parametrize(
    ("rho", "advantage", "options", "expected"),
    [
        (2.0, 2.0, {"dual_clip": 1.5}, -2.4),
        (2.0, -2.0, {"dual_clip": 1.5}, 3.0),
        (0.5, 2.0, {"dual_clip": 1.5}, -1.0),
        (2.0, -2.0, {}, 4.0),
        (0.5, -2.0, {}, 1.6),
        (2.0, 2.0, {"clip_high": 0.28}, -2.56),
        (0.5, -2.0, {"clip_low": 0.3}, 1.4),
        (1.1, 2.0, {}, -2.2),
        (1.0, 0.0, {}, 0.0),
    ],
)
def test_clipped_ratio_loss(rho: float, advantage: float, options: dict[str, float], expected: float) -> None:
    assert losses([rho], [advantage], **options) == pytest.approx([expected], rel=1e-6)


def test_clip_flags_say_which_bound_was_active() -> None:
    new = torch.tensor([2.0, 2.0, 0.5, 0.5]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    out = clipped_ratio_loss(new, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert out.clipped_high.tolist() == [True, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True]


def test_no_gradient_flows_through_clipped_tokens() -> None:
    new = torch.tensor([2.0, 1.1]).log().requires_grad_()
    out = clipped_ratio_loss(new, torch.zeros(2), torch.ones(2), clip_low=0.2, clip_high=0.2, dual_clip=None)
    out.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, -1.1])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 2, 1 / 6]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2]),
        ("dr-grpo", [1 / 16, 1 / 16]),
    ],
)
def test_aggregations(aggregation: Aggregation, expected: list[float]) -> None:
    weights = sample_weights(torch.tensor([1, 3]), aggregation, max_new_tokens=8)
    assert weights.tolist() == pytest.approx(expected)


def test_unknown_aggregation_is_named() -> None:
    with pytest.raises(ValueError, match="median"):
        sample_weights(torch.tensor([1]), "median", max_new_tokens=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_loss_and_gradient_do_not_depend_on_the_cut(aggregation: Aggregation, pieces: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (12,), generator=generator)
    owner = torch.repeat_interleave(torch.arange(12), lengths)
    old = torch.randn(int(lengths.sum()), generator=generator)
    start = old + 0.3 * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(12, generator=generator)[owner]
    weights = sample_weights(lengths, aggregation, max_new_tokens=8)[owner]

    def total(parts: list[torch.Tensor]) -> tuple[float, torch.Tensor]:
        new = start.clone().requires_grad_()
        value = 0.0
        for part in parts:
            out = clipped_ratio_loss(new[part], old[part], advantages[part], clip_low=0.2, clip_high=0.2, dual_clip=3.0)
            loss = (weights[part] * out.loss).sum()
            loss.backward()
            value += float(loss.detach())
        assert new.grad is not None
        return value, new.grad

    whole, gradient = total([torch.arange(old.numel())])
    groups = torch.randperm(12, generator=generator).chunk(pieces)
    cut_up, cut_gradient = total([torch.nonzero(torch.isin(owner, group)).flatten() for group in groups])
    assert cut_up == pytest.approx(whole, abs=1e-6)
    assert torch.allclose(cut_gradient, gradient, atol=1e-7)


def test_importance_weights_are_capped_and_detached() -> None:
    old = torch.tensor([LN2, 0.0, -LN2], requires_grad=True)
    weights = importance_weights(old, torch.zeros(3), cap=1.5)
    assert weights.tolist() == pytest.approx([1.5, 1.0, 0.5])
    assert not weights.requires_grad


def test_kl_estimate_is_zero_for_equal_policies_and_never_negative() -> None:
    old = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert kl_k3(old, old).tolist() == [0.0] * 100
    assert bool((kl_k3(old, old.flip(0)) >= 0).all())
    assert kl_k3(torch.zeros(1), torch.tensor([LN2])).item() == pytest.approx(1 - LN2)
