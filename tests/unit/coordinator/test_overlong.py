"""DAPO's soft overlong punishment: from its settings to scores, and from negative scores to advantages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.learn.advantages import group_advantages
from coordinator.learn.scoring import Scorer
from coordinator.rewards.base import ScoredText
from coordinator.rewards.registry import Part, build_rewards
from tandem_config.schema import RunConfig
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import write_small_model
from tests.unit.coordinator.test_scoring import group


def parts(max_new_tokens: int, *rewards: dict[str, Any]) -> list[Part]:
    sections = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "grpo": {"max_new_tokens": max_new_tokens}}
    return build_rewards(RunConfig.model_validate(sections | {"reward": list(rewards)}))


async def scores(max_new_tokens: int, cache: int | None, lengths: list[int]) -> list[float]:
    (part,) = parts(max_new_tokens, {"kind": "overlong", "cache_tokens": cache})
    items = [ScoredText(completion="", answer="", truncated=False, num_tokens=length) for length in lengths]
    return list((await part.reward.score(items)).values)


@pytest.mark.parametrize(
    ("longest", "cache", "expected"),
    [
        # DAPO's own numbers: nothing before 16,384, a 4,096th with each token from there, all of it at 20,480
        (20480, None, {1: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20479: -4095 / 4096, 20480: -1.0}),
        (20480, 4096, {16384: 0.0, 16385: -1 / 4096, 20480: -1.0, 20481: -1.0}),
        # a fifth, rounded down: 20 of 103
        (103, None, {83: 0.0, 84: -0.05, 103: -1.0}),
        (103, 50, {53: 0.0, 54: -0.02, 103: -1.0}),
        # fewer than five tokens: the last one
        (4, None, {3: 0.0, 4: -1.0}),
        (1, None, {1: -1.0}),
        # all of it
        (10, 10, {1: -0.1, 5: -0.5, 10: -1.0}),
    ],
)
async def test_scores_fall_over_the_last_tokens(longest: int, cache: int | None, expected: dict[int, float]) -> None:
    assert await scores(longest, cache, list(expected)) == pytest.approx(list(expected.values()), abs=1e-12)


async def test_negative_scores_lower_the_advantages_of_long_answers(tmp_path: Path) -> None:
    """Two of four answers are right, and the last four tokens of ten are punished at half weight."""
    rewards = parts(10, {"kind": "exact_match"}, {"kind": "overlong", "cache_tokens": 4, "weight": 0.5})
    scorer = Scorer(parts=rewards, codec=TextCodec.from_folders(write_small_model(tmp_path / "model")))
    # 3, 8 and 10 tokens with the stop token
    scored = await scorer.score([group("12", "12", "1234567", "12", "123456789"), group("7", *["123456789"] * 4)])
    assert scored.rewards_PG.tolist() == [[1.0, -0.25, 1.0, -0.5], [-0.5] * 4]
    assert scored.accuracy == 0.25
    plain = group_advantages(scored.rewards_PG, std="none")
    np.testing.assert_allclose(plain, [[0.6875, -0.5625, 0.6875, -0.8125], [0.0] * 4], atol=1e-12)
    divided = group_advantages(scored.rewards_PG, std="group")
    assert divided[0].argsort().tolist()[:2] == [3, 1]
    # all equally too long: punished alike, which is no signal
    assert divided[1].tolist() == [0.0] * 4
