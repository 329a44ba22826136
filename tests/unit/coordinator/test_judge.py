"""Judges at an OpenAI-compatible endpoint, against a small one that answers as each test says."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from coordinator.rewards.base import ScoredText, Scores
from coordinator.rewards.servers import calls
from coordinator.rewards.servers.judge import JudgedScores
from tandem_config.sections.rewards.servers import JudgeReward
from tests.fakes.fake_judge import Endpoint, said

KEY = "sk-secret-1234567890"
Judge = Callable[..., Awaitable[JudgedScores]]


@pytest.fixture
async def judge() -> AsyncIterator[Judge]:
    """`reward = await judge(endpoint, **settings)`: started, against this endpoint."""
    async with AsyncExitStack() as stack:

        async def make(endpoint: Endpoint, environ: Mapping[str, str] | None = None, **settings: Any) -> JudgedScores:
            server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            port = server.sockets[0].getsockname()[1]
            settings = {"model": "m", "prompt": "{{ answer }} {{ completion }}", "start_timeout_s": 1} | settings
            section = JudgeReward(kind="judge", url=f"http://127.0.0.1:{port}/v1", **settings)
            reward = JudgedScores(section, {} if environ is None else environ)
            stack.push_async_callback(reward.close)
            await reward.start([])
            return reward

        yield make


def text(completion: str = "five", **columns: Any) -> ScoredText:
    return ScoredText(completion=completion, answer="4", truncated=False, prompt="2+2?", columns=columns)


async def test_a_request_has_what_the_settings_say(judge: Judge) -> None:
    endpoint = Endpoint([said("Reasons. Score: 3, no, Score: 7.5")])
    template = "{{ prompt }}|{{ completion }}|{{ answer }}|{{ columns.level }}"
    reward = await judge(
        endpoint, {"K": f"{KEY}\n"}, api_key_env="K", prompt=template, system="Be fair.", body={"seed": 1}
    )
    assert await reward.score([text(level=5)]) == Scores(values=[0.75])
    assert endpoint.requests == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be fair."}, {"role": "user", "content": "2+2?|five|4|5"}],
            "temperature": 0.0,
            "max_tokens": 1024,
            "seed": 1,
        }
    ]
    assert endpoint.keys == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("settings", "answer", "value", "why"),
    [
        ({}, "score: 10", 1.0, ""),
        ({"full_score": 4.0}, "Score : 1", 0.25, ""),
        ({}, "score: 11", 0.0, "the judge said 11, which is not from 0 to full_score = 10"),
        ({}, "score: -1", 0.0, "the judge said -1"),
        ({}, "I cannot say.", 0.0, "the judge's answer of 13 characters has no match of pattern"),
        ({}, None, 0.0, "of 0 characters has no match"),
        ({"pattern": r"is (\w+)"}, "is nan", 0.0, "the judge said nan"),
        ({"pattern": r"is (\w+)"}, "is ten", 0.0, "the judge said 'ten', which is no number"),
        ({"pattern": r"(\w+)$", "scores": {"Yes": 1, "no": -0.5}}, "I say YES", 1.0, ""),
        ({"pattern": r"(\w+)$", "scores": {"Yes": 1, "no": -0.5}}, "no", -0.5, ""),
        ({"pattern": r"(\w+)$", "scores": {"Yes": 1, "no": -0.5}}, "maybe", 0.0, "'maybe', which is not in scores"),
        ({"prompt": "{{ columns.test }} {{ completion }}"}, "score: 1", 0.0, "prompt: 'dict object' has no attribute"),
    ],
)
async def test_answers_are_read(
    judge: Judge, settings: dict[str, Any], answer: str | None, value: float, why: str
) -> None:
    scores = await (await judge(Endpoint([said(answer)]), **settings)).score([text()])
    assert scores.values == [value]
    assert why in scores.errors.get(0, "")
    assert bool(scores.errors) == bool(why)


async def test_scores_are_in_order_whoever_is_first(judge: Judge) -> None:
    endpoint = Endpoint([said("score: 5")])
    reward = await judge(endpoint, concurrency=3)
    endpoint._answer = lambda line, body: Endpoint([said(f"score: {json.loads(body)['messages'][0]['content'][2:]}")])._answer(line, body)  # type: ignore[method-assign]  # fmt: skip  # noqa: E501
    assert (await reward.score([text(str(size)) for size in range(10)])).values == [size / 10 for size in range(10)]


async def test_too_many_requests_are_repeated_when_the_endpoint_says(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause_s(state: Any) -> float:
        pauses.append(state.outcome.exception().after_s)
        return 0.0

    monkeypatch.setattr(calls, "wait_s", pause_s)
    endpoint = Endpoint([(429, {"Retry-After": "7"}, "slow down"), (503, {}, "starting"), said("score: 10")])
    assert (await (await judge(endpoint)).score([text()])).values == [1.0]
    assert pauses == [7.0, 0.0]
    assert len(endpoint.requests) == 3


async def test_other_statuses_are_not_repeated(judge: Judge) -> None:
    endpoint = Endpoint([(400, {}, {"error": "no model m"})])
    scores = await (await judge(endpoint)).score([text()])
    assert 'status 400: {"error": "no model m"}' in scores.errors[0]
    assert len(endpoint.requests) == 1
    endpoint = Endpoint([(200, {}, {"choices": []})])
    assert "no choices[0].message.content" in (await (await judge(endpoint)).score([text()])).errors[0]


async def test_a_judge_that_refuses_is_not_asked_for_every_completion(judge: Judge) -> None:
    endpoint = Endpoint([(400, {}, "no such model")])
    scores = await (await judge(endpoint, concurrency=1)).score([text()] * 100)
    assert (len(endpoint.requests), len(scores.errors)) == (6, 100)
    assert scores.errors[99] == "not sent, because too many before it had failed"


async def test_the_key_is_in_no_error_and_no_log(judge: Judge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(
        ValueError, match=r"refuses the key of this run \(api_key_env\): status 401: .*\*\*\*"
    ) as caught:
        await judge(Endpoint([], models=401), {"K": KEY}, api_key_env="K")
    endpoint = Endpoint([(400, {}, f"wrong key {KEY}")])
    scores = await (await judge(endpoint, {"K": KEY}, api_key_env="K")).score([text()])
    assert "wrong key ***" in scores.errors[0]
    assert KEY not in f"{caught.value}{scores}{caplog.text}"
    with pytest.raises(ValueError, match="environment variable K is not set"):
        await judge(endpoint, {"K": " "}, api_key_env="K")


async def test_an_endpoint_that_is_not_there_is_named_in_time() -> None:
    section = JudgeReward(
        kind="judge", url="http://127.0.0.1:1/v1", model="m", prompt="{{ completion }}", start_timeout_s=2.0
    )
    with pytest.raises(ValueError, match=r"no endpoint at http://127.0.0.1:1/v1 within start_timeout_s = 2 s: Connect"):
        await JudgedScores(section).start([])
