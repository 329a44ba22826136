"""KL in the reward: verl's definition, what is asked of the trainer, and how it ends in rows."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from coordinator.learn.advantages import group_advantages
from coordinator.steps import compute_advantages, measure_divergence
from servicekit.errors import NotFinite
from tandem_clients.flow import (
    AdvantageResult,
    Completion,
    Divergence,
    Generation,
    Group,
    GroupScores,
    Prompt,
    Sample,
    policy_tokens,
)
from tandem_config.schema import GrpoSection

ROLLOUT, OLD, REFERENCE = -1.5, -1.0, -1.25
# Completions of 1 to 4 tokens, in two groups of two.
LENGTHS = ((1, 2), (3, 4))
REWARDS = np.array([[1.0, 0.0], [0.5, 0.5]])


@dataclass
class Asked:
    """A trainer whose log-probs are constants, 0 where masked; `spoilt` is of the reference's first token."""

    calls: list[tuple[list[str], bool]] = field(default_factory=list)
    spoilt: float = REFERENCE

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> Any:
        self.calls.append(([sample.sample_id for sample in samples], reference))
        mask = np.asarray(policy_tokens(samples), np.bool_)
        found = np.full(len(mask), REFERENCE if reference else OLD, np.float32)
        if reference:
            found[0] = self.spoilt
        return np.where(mask, found, 0.0)


def generation() -> Generation:
    prompt = Prompt(row=1, token_ids=array("I", [1, 2]), answer="")

    def completion(length: int) -> Completion:
        ids, logprobs = array("I", [3] * length), array("f", [ROLLOUT] * length)
        return Completion(token_ids=ids, logprobs=logprobs, truncated=False, oldest_version=0)

    groups = [
        Group(group_id=f"g{place}", prompt=prompt, completions=tuple(completion(length) for length in lengths))
        for place, lengths in enumerate(LENGTHS)
    ]
    return Generation(groups=tuple(groups), engine_s=1.0, retried_calls=0)


@dataclass
class KlSteps:
    """The steps that the penalty is in, with their settings."""

    grpo: GrpoSection
    trainer: Asked

    async def diverge(self, generated: Generation, scored: GroupScores) -> Divergence | None:
        return await measure_divergence(self.grpo, self.trainer, generated, scored)  # type: ignore[arg-type]

    def learn(self, scored: GroupScores, divergence: Divergence) -> AdvantageResult:
        return compute_advantages(self.grpo, scored, divergence)


def steps(trainer: Asked, **grpo: Any) -> KlSteps:
    settings = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"} | grpo
    return KlSteps(GrpoSection(**settings), trainer)


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
@pytest.mark.parametrize(
    ("estimator", "of"),
    [("k1", lambda d: -d), ("k2", lambda d: d * d / 2), ("k3", lambda d: np.exp(d) - d - 1)],
)
async def test_the_sum_over_tokens_is_taken_off_before_the_group_statistics(
    estimator: str, of: Any, old_logprobs: str
) -> None:
    trainer = Asked()
    grpo = steps(trainer, kl_estimator=estimator, old_logprobs=old_logprobs)
    scored = GroupScores(rewards_PG=REWARDS, accuracy=0.0)
    divergence = await grpo.diverge(generation(), scored)
    assert divergence is not None
    each = of(REFERENCE - (OLD if old_logprobs == "recompute" else ROLLOUT))
    penalised = REWARDS - 0.1 * each * np.array(LENGTHS)
    found = grpo.learn(scored, divergence)
    np.testing.assert_allclose(found.advantages_PG, group_advantages(penalised), rtol=0, atol=1e-6)
    # groups of equal rewards have a signal now, and are counted as before
    assert abs(found.advantages_PG[1]).min() > 0.5
    assert found.zero_variance_P.tolist() == [False, True]
    assert divergence.metrics["kl_reward"] == pytest.approx(0.1 * each * np.mean(LENGTHS))
    names = ["g0#0", "g0#1", "g1#0", "g1#1"]
    assert trainer.calls == [(names, True)] + [(names, False)] * (old_logprobs == "recompute")


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
async def test_masked_tokens_are_in_no_sum_and_no_mean(old_logprobs: str) -> None:
    generated, grpo = generation(), steps(Asked(), old_logprobs=old_logprobs)
    for completion, mask in zip(generated.groups[1].completions, ("101", "0100"), strict=True):
        completion.loss_mask = array("B", map(int, mask))
        for token in np.flatnonzero(~np.array(completion.loss_mask, np.bool_)):
            completion.logprobs[token] = float("nan")
    divergence = await grpo.diverge(generated, GroupScores(rewards_PG=REWARDS, accuracy=0.0))
    assert divergence is not None
    delta = REFERENCE - (OLD if old_logprobs == "recompute" else ROLLOUT)
    np.testing.assert_allclose(divergence.penalties_PG, -0.1 * delta * np.array([[1, 2], [2, 1]]), atol=1e-7)
    assert divergence.metrics["kl_reference"] == pytest.approx(np.exp(delta) - delta - 1)


async def test_samples_without_a_reward_are_not_measured() -> None:
    trainer, missing = Asked(), np.array([[False, True], [False, False]])
    grpo = steps(trainer)
    scored = GroupScores(rewards_PG=REWARDS, accuracy=0.0, missing_PG=missing)
    divergence = await grpo.diverge(generation(), scored)
    assert divergence is not None
    np.testing.assert_allclose(divergence.penalties_PG, [[0.025, 0.0], [0.075, 0.1]], atol=1e-7)
    assert trainer.calls[0] == (["g0#0", "g1#0", "g1#1"], True)
    assert grpo.learn(scored, divergence).advantages_PG[0].tolist() == [0.0, 0.0]
    nobody = GroupScores(rewards_PG=REWARDS, accuracy=0.0, missing_PG=np.ones((2, 2), np.bool_))
    assert await grpo.diverge(generation(), nobody) is None


async def test_a_divergence_that_is_not_finite_names_its_sample() -> None:
    with pytest.raises(NotFinite, match=r"samples: g0#0$"):
        await steps(Asked(spoilt=float("nan"))).diverge(generation(), GroupScores(rewards_PG=REWARDS, accuracy=0.0))


async def test_a_token_without_a_log_prob_of_the_engine_has_no_divergence() -> None:
    spoilt = generation()
    first = spoilt.groups[0].completions[0]
    grpo = steps(Asked(), old_logprobs="rollout")
    before = await grpo.diverge(generation(), GroupScores(rewards_PG=REWARDS, accuracy=0.0))
    for value in (float("nan"), float("-inf")):
        first.logprobs[0] = value
        found = await grpo.diverge(spoilt, GroupScores(rewards_PG=REWARDS, accuracy=0.0))
        assert found is not None
        assert before is not None
        difference_PG = before.penalties_PG - found.penalties_PG
        assert difference_PG[0, 0] == pytest.approx(0.1 * (ROLLOUT - REFERENCE))
        assert np.count_nonzero(difference_PG) == 1
