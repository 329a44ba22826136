"""The clipped ratio: values from the papers' formulas."""

from typing import Any

import pytest
import torch

from trainer_service.objectives.clipping import clipped_ratio_loss
from trainer_service.objectives.kl import kl_estimate

LN2 = 0.6931472


def losses(rho: list[float], advantages: list[float], **options: float | None) -> list[float]:
    settings: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, **options}
    out = clipped_ratio_loss(torch.tensor(rho).log(), torch.tensor(advantages), **settings)
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
    out = clipped_ratio_loss(new, advantages, clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert out.clipped_high.tolist() == [True, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True]


def test_no_gradient_flows_through_clipped_tokens() -> None:
    new = torch.tensor([2.0, 1.1]).log().requires_grad_()
    out = clipped_ratio_loss(new, torch.ones(2), clip_low=0.2, clip_high=0.2, dual_clip=None)
    out.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, -1.1])


def test_kl_estimate_is_zero_for_equal_policies_and_never_negative() -> None:
    old = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert kl_estimate(old, old).tolist() == [0.0] * 100
    assert bool((kl_estimate(old, old.flip(0)) >= 0).all())
    assert kl_estimate(torch.zeros(1), torch.tensor([LN2])).item() == pytest.approx(1 - LN2)
