from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.flow import Completion, Group, Prompt
from coordinator.learn.rewards.base import Reward, ScoredText, Scores
from coordinator.learn.rewards.exact_match import ExactMatch
from coordinator.learn.rewards.registry import Part
from coordinator.learn.scoring import Scorer
from servicekit.errors import Internal
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import EOS, encode, write_small_model


class Failing(Reward):
    """Fails for the first `count` items, is late for `late`, and cannot read the answer of the second."""

    def __init__(self, count: int, late: int = 0) -> None:
        self.count, self.late = count, late

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        return Scores(
            values=[0.0] * len(items),
            errors={place: f"KeyError: 'x{place}'" for place in range(self.count)},
            late=frozenset(range(self.count, self.count + self.late)),
            unreadable={1: "is empty"},
        )


def completion(said: str) -> Completion:
    ids = [*encode(said), EOS]
    return Completion(
        token_ids=array("I", ids), logprobs=array("f", [0.0] * len(ids)), truncated=False, oldest_version=0
    )


def group(answer: str, *said: str) -> Group:
    prompt = Prompt(row=1, token_ids=[3], answer=answer)
    return Group(group_id="g", prompt=prompt, completions=tuple(map(completion, said)))


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.from_folders(write_small_model(tmp_path / "model"))


def scorer(codec: TextCodec, reward: Reward, *others: Part, **settings: Any) -> Scorer:
    settings = {"max_error_share": 0.05, "on_error": "zero", "is_accuracy": True} | settings
    return Scorer(parts=[Part(key="reward", name="first", reward=reward, **settings), *others], codec=codec)


async def test_rewards_are_weighted_and_accuracy_is_not(codec: TextCodec) -> None:
    groups = [group("12", "12", "13", "12"), group("7", "8", "7", "70")]
    scored = await scorer(codec, ExactMatch(), weight=2.0).score(groups)
    assert scored.rewards_PG.tolist() == [[2.0, 0.0, 2.0], [0.0, 2.0, 0.0]]
    assert scored.accuracy == 0.5


async def test_failed_scores_have_a_budget(codec: TextCodec) -> None:
    groups = [group("1", *["1"] * 20) for _ in range(5)]
    assert (await scorer(codec, Failing(5)).score(groups)).num_errors == 5
    with pytest.raises(
        Internal, match=r"failed for 6 of 100 .* more than reward.max_error_share = 5%; .* g#0: KeyError: 'x0'"
    ):
        await scorer(codec, Failing(6)).score(groups)


async def test_late_scores_have_a_budget_of_their_own(codec: TextCodec) -> None:
    groups = [group("1", *["1"] * 20) for _ in range(5)]
    scored = await scorer(codec, Failing(0, late=25)).score(groups)
    assert (scored.num_timeouts, scored.num_unreadable, scored.unreadable_rows) == (25, 1, {1: "is empty"})
    with pytest.raises(Internal, match=r"longer than reward.timeout_s for 26 of 100 completions"):
        await scorer(codec, Failing(0, late=26)).score(groups)
    few = [group("1", "1", "1", "1", "1")]
    assert (await scorer(codec, Failing(0, late=2)).score(few)).num_timeouts == 2
