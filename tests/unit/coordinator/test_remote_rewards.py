"""Remote rewards against a served RewardServicer: what is sent, what comes back, and how failures are named."""

import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from coordinator.rewards.base import ScoredText, Scores, StoppedOnly
from coordinator.rewards.registry import build_rewards, start_rewards
from coordinator.rewards.servers.remote import RemoteScores
from coordinator.rewards.servers.samples import to_sample, wire_bytes
from reward_service import NotScored, RewardSample, RewardScorer, SampleScore
from reward_service.servicer import FULL_NAME, RewardServicer
from servicekit.errors import TooLarge
from servicekit.rpc.server import GrpcServer
from tandem_api.reward.v1 import reward_pb2
from tandem_api.reward.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from tandem_config.loading import load_config
from tandem_config.sections.rewards.servers import RemoteReward


class Lengths(RewardScorer):
    """Scores a completion's length; keeps what it was called with."""

    name = "lengths"
    max_batch_size = 4

    def __init__(self) -> None:
        self.calls: list[list[RewardSample]] = []

    def score(self, samples: Sequence[RewardSample]) -> Sequence[float | SampleScore | NotScored]:
        self.calls.append(list(samples))
        return [self.one(sample) for sample in samples]

    def one(self, sample: RewardSample) -> float | SampleScore | NotScored:
        match sample.completion:
            case "odd":
                return NotScored("is odd")
            case "nan":
                return math.nan
            case "parts":
                return SampleScore(value=5.0, parts={"tone": 0.5})
            case "names":
                return SampleScore(value=4.0, parts={"a b": 0.5, "tone": math.nan})
        return float(len(sample.completion))


class Groups(Lengths):
    """Needs all that there is."""

    needs_whole_groups = needs_token_ids = True
    required_columns = ("level",)


class Broken(Lengths):
    """Fails, or is too busy, as its completions say."""

    def score(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        self.calls.append(list(samples))
        match samples[0].completion:
            case "few":
                return [1.0]
            case "busy" if len(self.calls) < 3:
                raise TooLarge("queue is full")
            case "raise":
                raise ValueError("bad temper")
        return [1.0] * len(samples)


Remote = Callable[..., Awaitable[RemoteScores]]


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    """`reward = await remote(scorer, **settings)`: started, against a server with this scorer."""
    async with AsyncExitStack() as stack:

        async def make(scorer: RewardScorer, **settings: Any) -> RemoteScores:
            server, servicer = GrpcServer("reward"), RewardServicer(scorer)
            server.add(add_RewardServiceServicer_to_server, servicer, FULL_NAME)
            address = await server.start()
            stack.push_async_callback(server.drain, 0)
            stack.callback(servicer.close)
            await servicer.load()
            server.set_ready(True)
            reward = RemoteScores(RemoteReward(kind="remote", address=address, **settings), None)
            stack.push_async_callback(reward.close)
            await reward.start(["prompt", "level"])
            return reward

        yield make


def text(completion: str, group: int = 0, **fields: Any) -> ScoredText:
    settings: dict[str, Any] = {"answer": "4", "truncated": False, "sample_id": f"g{group}#{completion}"} | fields
    return ScoredText(completion=completion, group=group, **settings)


async def test_a_sample_travels_whole(remote: Remote) -> None:
    scorer = Groups()
    item = text(
        "a\0\n\u4e2d", 3, prompt="p", columns={"level": 5, "tags": ["x", None]}, num_tokens=7, truncated=True,
        prompt_ids=[1, 2], completion_ids=[3], sample_id="i1.g3.row7#0",
    )  # fmt: skip
    assert await (await remote(scorer)).score([item]) == Scores(values=[4.0])
    ((sample,),) = scorer.calls
    assert (sample.sample_id, sample.group, sample.prompt, sample.completion) == (item.sample_id, 3, "p", "a\0\n\u4e2d")
    assert (sample.answer, sample.columns) == ("4", {"level": 5, "tags": ["x", None]})
    assert (sample.num_tokens, sample.truncated) == (7, True)
    assert (list(sample.prompt_token_ids), list(sample.completion_token_ids)) == ([1, 2], [3])


async def test_token_ids_are_sent_only_if_they_are_needed(remote: Remote) -> None:
    scorer = Lengths()
    await (await remote(scorer)).score([text("a", prompt_ids=[1], completion_ids=[2])])
    assert list(scorer.calls[0][0].prompt_token_ids) == list(scorer.calls[0][0].completion_token_ids) == []


async def test_batches_are_as_small_as_both_want_and_scores_are_in_order(remote: Remote) -> None:
    items = [text("x" * size) for size in range(11)]
    for batch_size, sizes in ((3, [2, 3, 3, 3]), (100, [3, 4, 4])):
        scorer = Lengths()
        scores = await (await remote(scorer, batch_size=batch_size)).score(items)
        assert scores.values == [float(size) for size in range(11)]
        assert sorted(len(call) for call in scorer.calls) == sizes


async def test_no_call_is_larger_than_a_message_may_be(remote: Remote) -> None:
    mib = 2**20
    sizes = [3 * mib // 2] * 5 + [5 * mib, 1]
    items = [text(letter * size, sample_id=letter) for letter, size in zip("abcdefg", sizes, strict=True)]
    scorer = Lengths()
    scores = await (await remote(scorer)).score(items)
    assert scores == Scores(values=list(map(float, sizes)))
    assert sorted("".join(sample.completion[0] for sample in call) for call in scorer.calls) == [
        "ab",
        "cd",
        "e",
        "f",
        "g",
    ]


@pytest.mark.parametrize("said", ["a", "\u4e2d\u00e9", '\n"\\'])
@pytest.mark.parametrize("token_ids", [True, False])
def test_the_bytes_of_a_sample_are_at_least_those_of_its_message(said: str, token_ids: bool) -> None:
    numbers: dict[str, Any] = {"num_tokens": 2**31, "prompt_ids": [2**31] * 200, "completion_ids": [2**31]}
    item = text(said, 2**31, prompt=said, columns={"a": [said, 0.1, None]}, truncated=True, **numbers)
    message = reward_pb2.ScoreBatchRequest(samples=[to_sample(item, token_ids=token_ids)])
    (bound,) = wire_bytes([item], token_ids=token_ids)
    assert message.ByteSize() <= bound <= message.ByteSize() + 64


@pytest.mark.parametrize(
    ("scorer", "named"),
    [(Lengths(), "g0#xx"), (Groups(), "the group of g0#xx.*, 2 samples that must stay together,")],
)
async def test_a_message_that_is_too_large_names_its_sample_and_is_not_repeated(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, scorer: Lengths, named: str
) -> None:
    monkeypatch.setattr("servicekit.rpc.server.SERVER_OPTIONS", (("grpc.max_receive_message_length", 2000),))
    monkeypatch.setattr("coordinator.rewards.servers.samples._MOST_BYTES", 2000)
    reward = await remote(scorer, start_timeout_s=30, retries=100)
    scores = await reward.score([text("x" * 3000), text("y"), text("z", 1)])
    assert scores.values[2] == 1.0
    assert 0 in scores.errors
    assert re.match(named + r".* makes a message of 0.0 MiB, which is too large: raise the server's", scores.errors[0])


async def test_groups_that_need_it_stay_whole(remote: Remote) -> None:
    scorer = Groups()
    items = [text(str(place), group) for group in range(5) for place in range(2)]
    await (await remote(scorer, batch_size=3)).score(items)
    assert sorted([sample.group for sample in call] for call in scorer.calls) == [[group] * 2 for group in range(5)]


def there(values: Sequence[float]) -> dict[int, float]:
    """Return the values that samples have, by their places."""
    return {place: value for place, value in enumerate(values) if not math.isnan(value)}


async def test_a_sample_that_has_no_score_says_why_and_the_others_have_theirs(remote: Remote) -> None:
    items = [text(said) for said in ("abc", "odd", "nan", "names", "parts")]
    scores = await (await remote(Lengths())).score(items)
    assert scores.values == [3.0, 0.0, 0.0, 4.0, 5.0]
    assert scores.errors == {1: "is odd", 2: "the server's score is nan"}
    assert {name: there(values) for name, values in scores.parts.values.items()} == {"a_b": {3: 0.5}, "tone": {4: 0.5}}
    assert list(scores.parts.remarks) == ["a b", "tone left out"]
    cut = [text("abc", truncated=True), text("parts"), text("odd")]
    only = await StoppedOnly(await remote(Lengths())).score(cut)
    assert (only.values, there(only.parts.values["tone"]), list(only.errors)) == ([0.0, 5.0, 0.0], {1: 0.5}, [2])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("few", "lengths returned 1 outcomes for 2 samples"),
        ("raise", "lengths: ValueError: bad temper"),
        ("\ud800", "cannot be sent"),
    ],
)
async def test_a_call_that_failed_for_good_is_not_repeated(remote: Remote, said: str, why: str) -> None:
    scorer = Broken()
    scores = await (await remote(scorer)).score([text(said), text("b")])
    assert list(scores.errors) == [0, 1]
    assert why in scores.errors[0]
    assert len(scorer.calls) <= 1


async def test_a_busy_server_is_asked_again(remote: Remote) -> None:
    scorer = Broken()
    assert await (await remote(scorer)).score([text("busy")]) == Scores(values=[1.0])
    assert len(scorer.calls) == 3


async def test_scores_of_other_samples_are_refused(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_service.servicer._score", lambda *_: reward_pb2.Score(sample_id="else", value=1.0))
    scores = await (await remote(Lengths())).score([text("a")])
    assert "it must return one for each, with its sample_id" in scores.errors[0]


async def test_a_missing_column_is_named_before_the_run(remote: Remote) -> None:
    class Wanting(Lengths):
        required_columns = ("level", "tests")

    with pytest.raises(ValueError, match=r"\(lengths\) needs column tests, and the data has prompt, level"):
        await remote(Wanting())


async def test_a_server_of_something_else_is_named() -> None:
    server = GrpcServer("other")
    reward = RemoteScores(RemoteReward(kind="remote", address=await server.start()), None)
    with pytest.raises(ValueError, match=r"reward server 127.0.0.1:\d+: .*it must serve tandem_api.reward.v1"):
        await reward.start([])
    await reward.close()
    await server.drain(0)


async def test_an_absent_server_is_named_in_time_by_its_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    absent = "{kind: remote, address: '127.0.0.1:1', start_timeout_s: 0.3}"
    file.write_text(f"model: {{path: m}}\ndata: {{train: rows.jsonl}}\nreward: [{{}}, {absent}]\n", encoding="utf-8")
    parts = build_rewards(load_config(file))
    with pytest.raises(
        ValueError, match=r"reward\[1\]: no reward server at 127.0.0.1:1 within start_timeout_s = 0.3 s: .*refused"
    ):
        await start_rewards(parts, [])
