import asyncio

import pytest

from coordinator.rewards.base import Reward, ScoredText, Scores, score_each
from coordinator.rewards.exact_match import ExactMatch
from coordinator.rewards.math_verify import MathVerify
from coordinator.rewards.regex import RegexMatch
from coordinator.rewards.registry import REWARDS, build_reward
from tandem_config.schema import RewardSection


def text(completion: str, answer: str = "42", *, truncated: bool = False) -> ScoredText:
    return ScoredText(completion=completion, answer=answer, truncated=truncated)


async def values(reward: Reward, *items: ScoredText) -> list[float]:
    return (await reward.score(items)).values


async def test_exact_match() -> None:
    items = [text("42"), text("42 "), text("042"), text("42", truncated=True)]
    assert await values(ExactMatch(require_stop=True), *items) == [1.0, 0.0, 0.0, 0.0]
    assert await values(ExactMatch(require_stop=False), *items) == [1.0, 0.0, 0.0, 1.0]


async def test_regex_compares_group_one_of_the_last_match() -> None:
    reward = RegexMatch(pattern=r"answer: *(\d+)")
    items = [text("answer: 42"), text("answer: 1, no, answer: 42"), text("answer: 42, no, answer: 1"), text("42")]
    assert await values(reward, *items) == [1.0, 1.0, 0.0, 0.0]


async def test_regex_without_a_group_asks_for_the_format_only() -> None:
    assert await values(RegexMatch(pattern=r"^<a>.*</a>$"), text("<a>7</a>"), text("7")) == [1.0, 0.0]


def test_a_pattern_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward.pattern '\(' is not a regular expression"):
        RegexMatch(pattern="(")


def test_an_exception_scores_zero_and_is_counted() -> None:
    def divide(item: ScoredText) -> float:
        return 1.0 / len(item.completion)

    scores = score_each(divide, [text("a"), text(""), text("")])
    assert scores == Scores(
        values=[1.0, 0.0, 0.0], num_errors=2, first_error="ZeroDivisionError: float division by zero"
    )


async def test_math_verify_knows_equal_values() -> None:
    reward = MathVerify(num_workers=1)
    try:
        items = [
            text(r"so it is $\frac{1}{2}$", "0.5"),
            text(r"\boxed{42}"),
            text("The answer is 41"),
            text(r"$x^2 + 2x + 1$", "$(x+1)^2$"),
            text("no number at all"),
        ]
        assert await values(reward, *items) == [1.0, 1.0, 0.0, 1.0, 0.0]
        assert await values(reward) == []
    finally:
        reward.close()


async def test_late_workers_cost_their_scores_and_are_replaced() -> None:
    reward = MathVerify(num_workers=1, timeout_s=0.001)
    try:
        scores = await reward.score([text("42")] * 3)
        assert scores == Scores(values=[0.0] * 3, num_errors=3, first_error="math-verify did not answer in time")
        assert reward._pool is None
    finally:
        reward.close()


async def test_math_verify_does_not_block_the_loop() -> None:
    reward = MathVerify(num_workers=1)
    ticks = 0
    try:
        scoring = asyncio.create_task(reward.score([text(r"\boxed{42}")] * 64))
        while not scoring.done():
            await asyncio.wait({scoring}, timeout=0.01)
            ticks += 1
        assert sum(scoring.result().values) == 64
        assert ticks > 3
    finally:
        reward.close()


def test_the_registry_builds_what_the_configuration_names() -> None:
    assert set(REWARDS) == {"exact_match", "regex", "math_verify"}
    assert isinstance(build_reward(RewardSection()), ExactMatch)
    assert isinstance(build_reward(RewardSection(kind="regex", pattern="a")), RegexMatch)
    with pytest.raises(ValueError, match=r"reward.pattern is not set"):
        build_reward(RewardSection(kind="regex"))
