"""Seeded draws: of the right distribution, and a function of row, seed and position alone."""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from rollout_service.sglang_engine.scheduler import seeds
from rollout_service.sglang_engine.scheduler.seeds import all_or_none, draw_from_logprobs, draw_from_probs, seeded_draw

NUM = 40_000
PROBS = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01, 0.0])


@pytest.mark.parametrize("which", ["seeds", "positions", "near seeds"])
def test_draws_have_the_distribution(which: str) -> None:
    """Over seeds, over the positions of one completion, and over a group's completions, whose seeds are neighbours."""
    count = torch.arange(NUM)
    seeds_B = {"seeds": count * 982_451_653, "positions": torch.full((NUM,), 7), "near seeds": count}[which]
    positions_B = count if which == "positions" else torch.full((NUM,), 12)
    drawn = seeded_draw(PROBS.expand(NUM, -1).contiguous(), seeds_B, positions_B)
    counts = torch.bincount(drawn, minlength=6)
    assert counts[5] == 0
    assert chisquare(counts[:5], PROBS[:5] * NUM).pvalue > 1e-4


def test_two_positions_are_independent() -> None:
    first, second = (
        seeded_draw(torch.full((NUM, 2), 0.5), torch.arange(NUM), torch.full((NUM,), place)) for place in (3, 4)
    )
    assert abs(float((first == second).float().mean()) - 0.5) < 0.01


def test_a_draw_does_not_depend_on_the_batch_nor_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, number = torch.rand(50, 64), torch.arange(50)
    whole = seeded_draw(probs, number, number)
    assert seeded_draw(probs[7:8], number[7:8], number[7:8]) == whole[7]
    monkeypatch.setattr(seeds, "_CHUNK", 192)
    assert seeded_draw(probs, number, number).equal(whole)
    assert draw_from_logprobs(probs.double().log(), number, number)[:, 0].equal(whole)


def test_without_seeds_sglang_draws() -> None:
    def sglang(probs: torch.Tensor, **others: torch.Tensor | None) -> str:
        return "SGLang's"

    assert draw_from_probs(sglang, PROBS[None]) == "SGLang's"
    drawn = draw_from_probs(sglang, PROBS[None], torch.tensor([1]), torch.tensor([2]))
    assert (drawn.shape, drawn.dtype) == ((1,), torch.int32)


def test_a_batch_has_seeds_for_all_requests_or_for_none() -> None:
    with_seeds, without = (SimpleNamespace(sampling_seed=value) for value in (torch.tensor([1]), None))
    all_or_none(with_seeds, with_seeds)
    assert with_seeds.sampling_seed is not None
    all_or_none(with_seeds, without)
    assert with_seeds.sampling_seed is None
