from types import SimpleNamespace

import pytest
import torch

from rollout_service.sglang_engine.plugin import _leave_out_foreign_experts, local_experts

T, H, F, E, K = 5, 6, 4, 4, 2


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w13, w2 = (torch.randn(shape, generator=generator) for shape in ((T, H), (E, 2 * F, H), (E, H, F)))
    return x, w13, w2


def routed() -> tuple[torch.Tensor, torch.Tensor]:
    """A token of which both choices are on one rank, and others."""
    ids = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [1, 0]])
    return torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)), ids


def test_the_sums_of_two_ranks_are_the_whole() -> None:
    (x, w13, w2), (share, ids) = weights(), routed()
    expected = torch.zeros(T, H)
    for token in range(T):
        for choice in range(K):
            gate, up = (w13[ids[token, choice]] @ x[token]).chunk(2)
            out = w2[ids[token, choice]] @ (torch.nn.functional.silu(gate) * up)
            expected[token] += share[token, choice] * out
    here = torch.where(ids < 2, ids, -1)
    there = torch.where(ids >= 2, ids - 2, -1)
    parts = local_experts(x, w13[:2], w2[:2], share, here) + local_experts(x, w13[2:], w2[2:], share, there)
    torch.testing.assert_close(parts, expected)


def test_a_rank_with_every_expert_takes_sglangs_own_path() -> None:
    share, ids = routed()
    topk = SimpleNamespace(topk_weights=share, topk_ids=ids)
    own = torch.ones(1)
    assert _leave_out_foreign_experts(lambda *arguments: own, None, own, topk, None) is own


def test_an_activation_that_is_not_built_is_refused() -> None:
    share, ids = routed()
    topk = SimpleNamespace(topk_weights=share, topk_ids=ids - 1)
    with pytest.raises(NotImplementedError, match="gelu"):
        _leave_out_foreign_experts(lambda *a: share, None, share, topk, SimpleNamespace(activation="gelu"))
