import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.learn.scoring import Scorer
from coordinator.record.iteration_warnings import score_remarks
from coordinator.rewards.base import PART_NAME, Reward, ScoredText, Scores, StoppedOnly, parts_of
from coordinator.rewards.episodes import EpisodeReward
from coordinator.rewards.exact_match import ExactMatch
from coordinator.rewards.lengths import PerLength, length_score
from coordinator.rewards.registry import Part
from servicekit.errors import Internal
from tandem_clients.flow import Completion, Group, Prompt
from tandem_clients.transcript import Transcript
from tandem_config.sections.environment import EnvironmentSection
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
    prompt = Prompt(row=1, token_ids=array("I", [3]), answer=answer)
    return Group(group_id="g", prompt=prompt, completions=tuple(map(completion, said)))


def episode(*turns: str, answers: str, **said: Any) -> Completion:
    """Turns of the policy, with the same answer between them."""
    ids, mask = list[int](), list[int]()
    messages: list[dict[str, Any]] = []
    for place, text in enumerate(turns):
        between = encode(answers) if place else []
        ids += [*between, *encode(text), EOS]
        mask += [0] * len(between) + [1] * (len(encode(text)) + 1)
        messages += [{"role": "tool", "content": answers}] * bool(place) + [{"role": "assistant", "content": text}]
    return Completion(
        token_ids=array("I", ids),
        logprobs=array("f", [0.0] * len(ids)),
        truncated=False,
        oldest_version=0,
        loss_mask=array("B", mask) if len(turns) > 1 else None,
        transcript=Transcript(messages=messages, **said),
    )


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.from_folders(write_small_model(tmp_path / "model"))


def scorer(codec: TextCodec, reward: Reward, *others: Part, **changes: Any) -> Scorer:
    settings: dict[str, Any] = {"max_error_share": 0.05, "on_error": "zero", "is_accuracy": True} | changes
    return Scorer(parts=[Part(key="reward", name="first", reward=reward, **settings), *others], codec=codec)


async def test_rewards_are_weighted_and_accuracy_is_not(codec: TextCodec) -> None:
    groups = [group("12", "12", "13", "12"), group("7", "8", "7", "70")]
    scored = await scorer(codec, ExactMatch(), weight=2.0).score(groups)
    assert scored.rewards_PG.tolist() == [[2.0, 0.0, 2.0], [0.0, 2.0, 0.0]]
    assert scored.accuracy == 0.5


async def test_several_rewards_are_added_by_weight_and_kept_apart(codec: TextCodec) -> None:
    length = Part(key="reward[1]", name="length", reward=PerLength(partial(length_score, full=0, zero=4)), weight=0.5)
    scored = await scorer(codec, ExactMatch(), length).score([group("12", "12", "1", "123")])
    assert {name: part.tolist() for name, part in scored.parts.items()} == {
        "first": [[1.0, 0.0, 0.0]],
        "length": [[0.25, 0.5, 0.0]],
    }
    assert scored.rewards_PG.tolist() == [[1.125, 0.25, 0.0]]
    assert (scored.accuracy_part, scored.accuracy) == ("first", 1 / 3)
    other = await scorer(
        codec, PerLength(partial(length_score, full=0, zero=4)), replace(length, is_accuracy=True), is_accuracy=False
    ).score([group("12", "12", "1", "123")])
    assert (other.accuracy_part, other.accuracy) == ("length", 0.25)


class Sometimes(Reward):
    """Applies to the completions that it has a score for; the others have none, or a part that is no number."""

    def __init__(self, **scores: float) -> None:
        self.scores = scores

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        absent = frozenset(place for place, item in enumerate(items) if f"c{item.completion}" not in self.scores)
        parts = {place: {"acc/strict": math.nan if place == 0 else 0.5} for place in range(2)}
        values = [self.scores.get(f"c{item.completion}", 0.0) for item in items]
        return Scores(values=values, absent=absent, parts=parts_of(parts, len(items)))


async def test_a_reward_that_does_not_apply_is_left_out_of_the_sum_and_of_its_mean(codec: TextCodec) -> None:
    groups = [group("12", "12", "13", "14")]
    some = Part(key="reward[1]", name="some", reward=Sometimes(c12=0.5), weight=2.0)
    scored = await scorer(codec, ExactMatch(), some).score(groups)
    assert scored.rewards_PG.tolist() == [[2.0, 0.0, 0.0]]
    assert (scored.num_missing, scored.num_errors, scored.num_absent) == (0, 0, 2)
    assert {name: values_S.tolist() for name, values_S in scored.present_parts().items()} == {
        "first": [1.0, 0.0, 0.0],
        "some": [0.5],
        "some_acc_strict": [0.5],
    }
    alone = await scorer(codec, Sometimes(c12=0.5, c13=0.0)).score(groups)
    assert alone.present_PG.tolist() == [[True, True, False]]
    assert (alone.accuracy, alone.num_missing) == (0.25, 1)
    measured = await scorer(codec, Sometimes(c12=0.5), replace(some, reward=ExactMatch(), weight=0.0)).score(groups)
    assert measured.present_PG.tolist() == [[True, False, False]]


async def test_odd_parts_and_a_reward_that_never_applies_are_told_once(codec: TextCodec) -> None:
    known: set[str] = set()
    scored = await scorer(codec, ExactMatch(), Part(key="reward[1]", name="some", reward=Sometimes())).score(
        [group("12", "12", "13")]
    )
    assert scored.num_parts_left_out == 1
    assert [message for _, message in score_remarks("data.train", scored, known)] == [
        "data.train: reward some: part 'acc/strict' is reported as acc_strict",
        "data.train: reward some: part 'acc/strict' is not a finite number in 1 of 2 completions, and is left out "
        "of its mean there",
        "data.train: reward some returned None for all of 2 completions: it applies to none of them, or its "
        "function lacks a return",
    ]
    assert list(score_remarks("data.train", scored, known)) == []


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (["acc/strict", "acc_strict"], ["acc_strict", "acc_strict_2"]),
        (["acc_strict", "acc-strict"], ["acc_strict", "acc_strict_2"]),
        (["format-ok", "bad name!", "2", "pass@1"], ["format_ok", "bad_name", "part_2", "pass_1"]),
        (["分", "", "a" * 50], ["part", "part_2", "a" * 40]),
        ([f"p{place}" for place in range(20)], [f"p{place}" for place in range(16)]),
    ],
)
def test_parts_of_any_name_are_reported_under_names_of_their_own(given: list[str], reported: list[str]) -> None:
    found = parts_of({0: dict.fromkeys(given, 1.0), 1: {}}, 2)
    assert sorted(found.values) == sorted(reported)
    assert all(PART_NAME.fullmatch(name) and values[0] == 1.0 for name, values in found.values.items())
    assert found.num_left_out == len(given) - len(reported)
    assert found.remarks


async def test_of_no_score_at_all_there_is_no_accuracy(codec: TextCodec) -> None:
    scored = await scorer(codec, Sometimes()).score([group("12", "12", "13")])
    assert np.isnan(scored.accuracy)


async def test_the_accuracy_is_reported_first_then_the_others_as_configured_then_parts(codec: TextCodec) -> None:
    last = Part(
        key="reward[1]", name="a_last", reward=PerLength(partial(length_score, full=0, zero=4)), is_accuracy=True
    )
    scored = await scorer(codec, Sometimes(c12=1.0), last, is_accuracy=False).score([group("12", "12", "13")])
    assert list(scored.parts) == ["a_last", "first", "first_acc_strict"]


async def test_rewards_see_all_of_a_sample(codec: TextCodec) -> None:
    class Curious(Reward):
        async def score(self, items: Sequence[ScoredText]) -> Scores:
            self.seen = list(items)
            return Scores(values=[0.0] * len(items))

    reward = Curious()
    prompt = Prompt(row=7, token_ids=array("I", [3]), answer="12", text="1+2=", columns={"level": 3})
    groups = [Group(group_id="i1.g0.row7", prompt=prompt, completions=(completion("1"),)), group("7", "8")]
    await scorer(codec, reward).score(groups)
    assert reward.seen[0] == ScoredText(
        completion="1", answer="12", truncated=False, num_tokens=2, prompt="1+2=", columns={"level": 3},
        sample_id="i1.g0.row7#0", group=0, prompt_ids=prompt.token_ids, completion_ids=array("I", [*encode("1"), EOS]),
    )  # fmt: skip
    assert [(item.sample_id, item.group, item.answer) for item in reward.seen[1:]] == [("g#0", 1, "7")]


async def test_a_failed_score_is_zero_or_leaves_its_sample_out_or_ends_the_run(codec: TextCodec) -> None:
    groups = [group("1", *["1"] * 20)]
    zero = await scorer(codec, Failing(1)).score(groups)
    assert (zero.num_missing, zero.num_errors, zero.first_error) == (0, 1, "first of g#0: KeyError: 'x0'")
    assert zero.failures == {0: {"first": "KeyError: 'x0'"}}
    exact = Part(key="reward[1]", name="exact", reward=ExactMatch(), is_accuracy=True)
    drop = await scorer(codec, Failing(1, late=1), exact, on_error="drop", is_accuracy=False).score(groups)
    assert drop.missing_PG is not None
    assert (np.flatnonzero(drop.missing_PG).tolist(), drop.num_missing) == ([0, 1], 2)
    assert (drop.num_errors, drop.num_timeouts, drop.accuracy) == (1, 1, 1.0)
    assert drop.failures[1] == {"first": "it took longer than reward.timeout_s"}
    for failing in (Failing(1), Failing(0, late=1)):
        with pytest.raises(Internal, match=r"reward first: scoring failed for 1 of 20 .*on_error is stop; .*of g#0: "):
            await scorer(codec, failing, on_error="stop").score(groups)


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
    assert (scored.num_timeouts, scored.num_unreadable, scored.unreadable_rows) == (25, 1, {":1": "is empty"})
    with pytest.raises(Internal, match=r"longer than reward.timeout_s for 26 of 100 completions"):
        await scorer(codec, Failing(0, late=26)).score(groups)
    few = [group("1", "1", "1", "1", "1")]
    assert (await scorer(codec, Failing(0, late=2)).score(few)).num_timeouts == 2


async def test_unreadable_answers_of_equal_rows_in_two_files_are_told_apart(codec: TextCodec) -> None:
    def of_file(name: str) -> Group:
        prompt = Prompt(row=7, token_ids=array("I", [3]), answer="", file=f"data/{name}.jsonl", file_label=name)
        return Group(group_id=name, prompt=prompt, completions=(completion("1"), completion("2")))

    known: set[str] = set()
    said = []
    for name in ("a", "b", "a"):
        scored = await scorer(codec, Failing(0)).score([of_file(name)])
        said += list(score_remarks("data.train", scored, known))
    why = "the answer is empty, so every completion scores 0 (`tandem check` lists such rows)"
    assert said == [
        ("unreadable_answer", f"data.train, data/a.jsonl:7: {why}"),
        ("unreadable_answer", f"data.train, data/b.jsonl:7: {why}"),
    ]


async def test_places_of_failures_are_those_of_all_completions() -> None:
    """With `require_stop` the reward sees the others only."""
    texts = [ScoredText(completion="1", answer="1", truncated=place in (0, 2)) for place in range(6)]
    scores = await StoppedOnly(Failing(1, late=1)).score(texts)
    assert (list(scores.errors), list(scores.late), list(scores.unreadable)) == ([1], [3], [3])


class Seen(Reward):
    """Notes what it gets."""

    def __init__(self) -> None:
        self.items: list[ScoredText] = []

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        self.items += items
        return Scores(values=[0.0] * len(items))


def episodes_of(*completions: Completion) -> Group:
    prompt = Prompt(row=1, token_ids=array("I", [3]), answer="12", messages=[{"role": "user", "content": "5+7"}])
    return Group(group_id="g", prompt=prompt, completions=completions)


async def test_of_several_turns_the_last_is_scored_after_all_others(codec: TextCodec) -> None:
    seen = Seen()
    groups = [episodes_of(episode("5+7", "12", answers="=12", end="done"), episode("12", answers="", end="done"))]
    scored = await scorer(codec, ExactMatch(), Part(key="reward[1]", name="seen", reward=seen)).score(groups)
    assert scored.rewards_PG.tolist() == [[1.0, 1.0]]
    two, one = seen.items
    assert [message["content"] for message in two.messages or ()] == ["5+7", "5+7", "=12"]
    assert [message["content"] for message in one.messages or ()] == ["5+7"]
    assert (two.completion, two.num_tokens, len(two.completion_ids)) == ("12", 7, 10)


async def test_what_the_environment_gave_is_a_reward(codec: TextCodec) -> None:
    given = [[None, 0.5, 1.0], [None], [-1.0]]
    group_ = episodes_of(*(episode("1", answers="", rewards=one, end="done") for one in given))
    assert (await scorer(codec, EpisodeReward()).score([group_])).rewards_PG.tolist() == [[1.5, 0.0, -1.0]]
    none = await scorer(codec, EpisodeReward()).score([episodes_of(episode("1", answers="", rewards=[None]))])
    assert none.remarks == {
        "first.none": "reward first: the environment gave no reward for any of 1 episodes; each counts as 0"
    }


@pytest.mark.parametrize(("on_error", "rewards", "present"), [("zero", 0.0, True), ("drop", 0.0, False)])
async def test_an_episode_whose_environment_failed_gets_what_the_settings_say(
    codec: TextCodec, on_error: Any, rewards: float, present: bool
) -> None:
    section = EnvironmentSection(tools=("tools.py:add",), on_error=on_error, max_error_share=0.5)
    parts = [Part(key="reward", name="first", reward=ExactMatch(), is_accuracy=True)]
    failed = episode("12", answers="", end="failed", error="g#0: killed")
    scoring = Scorer(parts=parts, codec=codec, environment=section)
    scored = await scoring.score([episodes_of(failed, episode("12", answers="", end="done"))])
    assert scored.rewards_PG.tolist() == [[rewards, 1.0]]
    assert scored.present_PG.tolist() == [[present, True]]
    assert (scored.num_errors, scored.first_error) == (1, "g#0: killed")
    assert scored.failures == {0: {"environment": "g#0: killed"}}
    why = r"environment: 2 of 3 episodes failed, more than environment.max_error_share = 50% .*: g#0: killed"
    with pytest.raises(Internal, match=why):
        await scoring.score([episodes_of(failed, failed, episode("12", answers=""))])


async def test_with_on_error_stop_one_failed_episode_ends_the_run(codec: TextCodec) -> None:
    section = EnvironmentSection(tools=("tools.py:add",), on_error="stop")
    parts = [Part(key="reward", name="first", reward=ExactMatch(), is_accuracy=True)]
    failed = episode("12", answers="", end="failed", error="g#0: killed")
    with pytest.raises(Internal, match="1 of 2 episodes failed"):
        await Scorer(parts=parts, codec=codec, environment=section).score(
            [episodes_of(failed, episode("12", answers=""))]
        )
