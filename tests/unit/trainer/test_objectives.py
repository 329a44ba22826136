"""The objectives against the formulas of their papers: values, gradients, and invariance to the cut of a batch."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem_config.schema import GrpoSection
from tandem_config.sections.grpo import PRESETS
from tests.unit.trainer.objective_references import Sequence, aggregated, decoupled, token_losses
from trainer_service.objectives.aggregation import Aggregation, sample_weights
from trainer_service.objectives.corrections import CORRECTIONS, correct
from trainer_service.objectives.policy import OBJECTIVES
from trainer_service.objectives.tokens import Sequences, Tokens

BOUNDS = {"correction_low": 0.6, "correction_high": 1.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    **{preset: {"preset": preset} for preset in PRESETS},
    "grpo, dual clip": {"dual_clip": 1.5, "clip_low": 0.1, "clip_high": 0.3, "aggregation": "dr-grpo"},
    "gspo, wide": {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.1, "aggregation": "seq-mean-token-mean"},
    "gspo, by token": {"objective": "gspo", "clip_low": 0.1, "clip_high": 0.05, "aggregation": "token-mean"},
    "cispo, close": {"objective": "cispo", "clip_high": 0.1},
    "grpo, icepop": {"correction": "icepop", **BOUNDS},
    **{
        f"{objective}, {kind}, {level}": {
            "objective": objective,
            "correction": kind,
            "correction_level": level,
            **BOUNDS,
        }
        for kind in ("tis", "mis")
        for objective in OBJECTIVES
        for level in ("token", "sequence", "geometric")
        if (objective, level) != ("gspo", "token")
    },
}
every_setting = pytest.mark.parametrize(
    "grpo", [GrpoSection(max_new_tokens=8, **each) for each in SETTINGS.values()], ids=list(SETTINGS)
)


def batch(seed: int = 0, num_sequences: int = 12) -> list[Sequence]:
    """Completions of 1 to 8 tokens, whose log-probs differ as after some updates and with another engine."""
    random = np.random.default_rng(seed)

    def sequence(length: int) -> Sequence:
        old = random.normal(-2, 1, length).clip(max=-0.01)
        new, rollout = old + random.normal(0, 0.3, length), old + random.normal(0, 0.4, length)
        return Sequence(new=new, old=old, rollout=rollout, advantage=float(random.normal()))

    return [sequence(length) for length in random.integers(1, 9, num_sequences)]


def flat(sequences: list[Sequence], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(sequence, name) for sequence in sequences]))


def tokens_of(sequences: list[Sequence], index: Tensor, logprobs: Tensor, **changes: Any) -> Tokens:
    """Those tokens of the batch, as a micro-batch holds them."""
    lengths = torch.tensor([sequence.new.size for sequence in sequences])
    owner = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    advantages = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float64)
    return Tokens(
        logprobs=logprobs,
        old_logprobs=flat(sequences, "old")[index],
        rollout_logprobs=flat(sequences, "rollout")[index],
        advantages=advantages[owner[index]],
        sequences=Sequences(owner=owner[index], lengths=lengths, **changes),
    )


def loss_of(tokens: Tokens, grpo: GrpoSection) -> Tensor:
    loss = OBJECTIVES[grpo.objective](tokens, grpo).loss
    return loss if grpo.correction == "none" else loss * correct(tokens, grpo).weights


def computed(sequences: list[Sequence], grpo: GrpoSection, parts: list[Tensor], **changes: Any) -> tuple[float, Tensor]:
    """The loss and its gradient by each token's log-prob, [T], added up over parts of the batch."""
    logprobs, total = flat(sequences, "new").requires_grad_(), 0.0
    lengths = torch.tensor([sequence.new.size for sequence in sequences])
    weights = sample_weights(lengths, grpo.aggregation, max_new_tokens=grpo.max_new_tokens).double()
    for index in parts:
        tokens = tokens_of(sequences, index, logprobs[index], **changes)
        loss = (weights[tokens.sequences.owner] * loss_of(tokens, grpo)).sum()
        loss.backward()
        total += float(loss.detach())
    assert logprobs.grad is not None
    return total, logprobs.grad


def everything(sequences: list[Sequence]) -> Tensor:
    return torch.arange(sum(sequence.new.size for sequence in sequences))


@every_setting
def test_token_losses_are_those_of_the_paper(grpo: GrpoSection) -> None:
    sequences = batch()
    index = everything(sequences)
    found = loss_of(tokens_of(sequences, index, flat(sequences, "new")), grpo).numpy()
    expected = np.concatenate(token_losses(sequences, sequences, grpo))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@every_setting
def test_the_loss_is_aggregated_and_its_gradient_is_that_of_finite_differences(grpo: GrpoSection) -> None:
    sequences = batch(seed=1)
    total, gradient = computed(sequences, grpo, [everything(sequences)])
    assert total == pytest.approx(aggregated(token_losses(sequences, sequences, grpo), grpo), abs=1e-7)
    np.testing.assert_allclose(gradient.numpy(), finite_differences(sequences, grpo), rtol=0, atol=1e-7)


def finite_differences(sequences: list[Sequence], grpo: GrpoSection, step: float = 1e-5) -> np.ndarray[Any, Any]:
    """The reference's derivative by each token's log-prob, [T]."""

    def total(moved: int, token: int, by: float) -> float:
        new = sequences[moved].new.copy()
        new[token] += by
        changed = [replace(one, new=new) if place == moved else one for place, one in enumerate(sequences)]
        return aggregated(token_losses(changed, sequences, grpo), grpo)

    places = [(place, token) for place, one in enumerate(sequences) for token in range(one.new.size)]
    return np.array([(total(*place, step) - total(*place, -step)) / (2 * step) for place in places])


@every_setting
def test_neither_the_cut_nor_the_order_matters(grpo: GrpoSection) -> None:
    sequences = batch(seed=2)
    whole, gradient = computed(sequences, grpo, [everything(sequences)])
    owner = tokens_of(sequences, everything(sequences), flat(sequences, "new")).sequences.owner
    for pieces in (2, 5, 12):
        groups = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(pieces)).chunk(pieces)
        parts = [torch.cat([torch.nonzero(owner == one).flatten().flip(0) for one in group]) for group in groups]
        cut_up, cut_gradient = computed(sequences, grpo, parts)
        assert cut_up == pytest.approx(whole, abs=1e-12)
        torch.testing.assert_close(cut_gradient, gradient, rtol=0, atol=1e-12)


@every_setting
def test_ranks_that_share_a_sequence_compute_what_one_rank_does(grpo: GrpoSection) -> None:
    """Context parallelism: a rank has the even tokens of all samples, the other the odd ones."""
    sequences = batch(seed=3)
    index = everything(sequences)
    expected, gradient = computed(sequences, grpo, [index])
    local: list[list[Tensor]] = [[], []]
    for rank in (0, 1):
        computed(sequences, grpo, [index[rank::2]], add_ranks=lambda sums, rank=rank: local[rank].append(sums.clone()))
    together = [computed(sequences, grpo, [index[rank::2]], add_ranks=adding(local[1 - rank])) for rank in (0, 1)]
    assert sum(total for total, _ in together) == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(together[0][1] + together[1][1], gradient, rtol=0, atol=1e-12)


def adding(others: list[Tensor]) -> Any:
    left = iter(others)
    return lambda sums: sums.add_(next(left))


def test_decoupled_is_the_objective_over_the_behaviour_policy() -> None:
    sequences, grpo = batch(seed=4), GrpoSection(preset="decoupled")
    found = loss_of(tokens_of(sequences, everything(sequences), flat(sequences, "new")), grpo).numpy()
    expected = -np.concatenate([decoupled(sequence, grpo.clip_low, grpo.clip_high) for sequence in sequences])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_the_defaults_compute_bit_for_bit_what_they_did() -> None:
    """The loss before there was a choice of objectives, written out."""
    generator, size = torch.Generator().manual_seed(0), 4000
    old, advantages = torch.randn(size, generator=generator) - 3, torch.randn(size, generator=generator)
    start, weights = old + 0.3 * torch.randn(size, generator=generator), torch.rand(size, generator=generator)

    def expression(new: Tensor) -> Tensor:
        ratio = (new - old).clamp(-20.0, 20.0).exp()
        return torch.maximum(-ratio * advantages, -ratio.clamp(1 - 0.2, 1 + 0.2) * advantages)

    def today(new: Tensor) -> Tensor:
        sequences = Sequences(owner=torch.arange(size), lengths=torch.ones(size))
        return loss_of(
            Tokens(logprobs=new, old_logprobs=old, rollout_logprobs=old, advantages=advantages, sequences=sequences),
            GrpoSection(),
        )

    results = []
    for function in (expression, today):
        new = start.clone().requires_grad_()
        total = (weights * function(new)).sum()
        total.backward()
        results.append((total.detach(), new.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def hand(ratios: list[float], advantage: float, rollout: list[float] | None = None) -> list[Sequence]:
    """A sequence with these pi_theta / pi_old and, if given, pi_old / pi_roll; pi_theta is 0.5."""
    new = np.full(len(ratios), np.log(0.5))
    old = new - np.log(ratios)
    engine = old if rollout is None else old - np.log(rollout)
    return [Sequence(new=new, old=old, rollout=engine, advantage=advantage)]


@pytest.mark.parametrize(
    ("options", "ratios", "advantage", "losses", "gradient"),
    [
        # s = sqrt(4 x 1) = 2; its bound is 1.5
        ({"objective": "gspo", "clip_high": 0.5}, [4.0, 1.0], 1.0, [-1.5, -1.5], [0.0, 0.0]),
        # s = 1/2; its bound is 0.8
        ({"objective": "gspo", "clip_low": 0.2}, [0.25, 1.0], -1.0, [0.8, 0.8], [0.0, 0.0]),
        # s = 1.1, inside: each token has d(-2 s) / d log pi = -2.2 / 2 from each of the two losses, halved by the mean
        ({"objective": "gspo", "clip_high": 0.2}, [1.21, 1.0], 2.0, [-2.2, -2.2], [-1.1, -1.1]),
        # -min(rho, 1.5) A log 0.5, A = 1; no lower bound, and a gradient beyond the upper one
        (
            {"objective": "cispo", "clip_high": 0.5},
            [2.0, 0.25],
            1.0,
            [1.5 * np.log(2), 0.25 * np.log(2)],
            [-0.75, -0.125],
        ),
        ({"objective": "cispo", "clip_high": 0.5}, [2.0], -1.0, [-1.5 * np.log(2)], [1.5]),
    ],
)
def test_by_hand(
    options: dict[str, Any], ratios: list[float], advantage: float, losses: list[float], gradient: list[float]
) -> None:
    sequences, grpo = hand(ratios, advantage), GrpoSection(**options)
    tokens = tokens_of(sequences, everything(sequences), flat(sequences, "new"))
    assert loss_of(tokens, grpo).tolist() == pytest.approx(losses)
    assert computed(sequences, grpo, [everything(sequences)])[1].tolist() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("objective", "advantage", "reported", "low", "high"),
    [
        ("grpo", 1.0, [4.0, 0.25, 1.0], [False, False, False], [True, False, False]),
        ("grpo", -1.0, [4.0, 0.25, 1.0], [False, True, False], [False, False, False]),
        ("gspo", 1.0, [1.0, 1.0, 1.0], [False, False, False], [False, False, False]),
        ("cispo", -1.0, [4.0, 0.25, 1.0], [False, False, False], [True, False, False]),
    ],
)
def test_ratios_and_active_bounds_are_reported(
    objective: Any, advantage: float, reported: list[float], low: list[bool], high: list[bool]
) -> None:
    sequences = hand([4.0, 0.25, 1.0], advantage)
    tokens = tokens_of(sequences, everything(sequences), flat(sequences, "new").requires_grad_())
    found = OBJECTIVES[objective](tokens, GrpoSection(objective=objective))
    assert found.ratio.tolist() == pytest.approx(reported)
    assert (found.clipped_low.tolist(), found.clipped_high.tolist()) == (low, high)
    assert not found.ratio.requires_grad


@pytest.mark.parametrize(
    ("options", "ratios", "expected", "outside"),
    [
        ({"correction": "importance"}, [0.25, 1, 4], [0.25, 1, 4], 0),
        ({"correction": "tis", "correction_high": 2}, [0.25, 1, 4], [0.25, 1, 2], 1),
        ({"correction": "tis", "correction_high": 2, "correction_low": 0.5}, [0.25, 1, 4], [0.5, 1, 2], 2),
        ({"correction": "icepop", "correction_high": 2, "correction_low": 0.5}, [0.25, 1, 4], [0, 1, 0], 2),
        ({"correction": "mis", "correction_high": 2}, [0.25, 1, 4], [0.25, 1, 0], 1),
        ({"correction": "mis", "correction_level": "sequence", "correction_high": 3}, [2, 2], [0, 0], 2),
        ({"correction": "tis", "correction_level": "sequence", "correction_high": 3}, [2, 2], [3, 3], 2),
        ({"correction": "mis", "correction_level": "geometric", "correction_high": 3}, [4, 1], [2, 2], 0),
    ],
)
def test_corrections_by_hand(options: dict[str, Any], ratios: list[float], expected: list[float], outside: int) -> None:
    sequences = hand([1.0] * len(ratios), 1.0, rollout=ratios)
    logprobs = flat(sequences, "new").requires_grad_()
    tokens = replace(tokens_of(sequences, everything(sequences), logprobs), old_logprobs=logprobs)
    found = correct(tokens, GrpoSection(**options))
    assert found.weights.tolist() == pytest.approx(expected)
    assert int(found.outside.sum()) == outside
    assert not found.weights.requires_grad


def test_a_weight_for_every_ratio_is_finite() -> None:
    sequences = hand([1.0, 1.0], 1.0, rollout=[1e30, 1e30])
    tokens = tokens_of(sequences, everything(sequences), flat(sequences, "new").float())
    grpo = GrpoSection(correction="importance", correction_level="sequence")
    assert correct(tokens, grpo).weights.tolist() == pytest.approx([np.exp(20)] * 2)


def test_every_choice_of_the_configuration_is_registered() -> None:
    choices = {name: get_args(field.annotation) for name, field in GrpoSection.model_fields.items()}
    assert tuple(OBJECTIVES) == choices["objective"]
    assert ("none", *CORRECTIONS) == choices["correction"]
    assert get_args(Aggregation) == choices["aggregation"]
    assert tuple(PRESETS) == get_args(choices["preset"][0])
