"""How a call's requests reach SGLang's scheduler, and leave it: with SGLang's own messages, kept instead of sent."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_service.engine import Finish, GroupRequest, SampledCompletion, SamplingSettings, Span
from rollout_service.sglang_engine import dispatch
from rollout_service.sglang_engine.dispatch import GroupTokenizerManager, TokenStream, _Sample

pytestmark = [pytest.mark.integration]

SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4, stop_token_ids=())


def manager_of(states: dict[str, Any], sent: list[Any]) -> GroupTokenizerManager:
    made = object.__new__(GroupTokenizerManager)
    made.rid_to_state = dict(states)
    made.encoder_dispatch_ready = {}
    made.enable_metrics = False
    made._dispatch_to_scheduler = sent.append
    return made


def stream_of(manager: GroupTokenizerManager, num: int) -> tuple[TokenStream, list[_Sample]]:
    """A stream whose requests have been sent."""
    stream = TokenStream(manager, SAMPLING, lambda: 3, caches=False)
    samples = stream._samples(GroupRequest(group_id="g", prompt_ids=[1], num_completions=num), 3)
    for sample in samples:
        sample.state = SimpleNamespace(
            dispatched=True, abort_sent=False, output_ids=[], output_token_logprobs_val=[], finished=False
        )
        stream._running[sample.rid] = sample
    return stream, samples


def test_a_stream_is_given_up_with_one_message() -> None:
    # The scheduler looks through its whole queue for each: 65,536 messages took minutes, and the replica ended.
    sent: list[Any] = []
    manager = manager_of({}, sent)
    stream, samples = stream_of(manager, 100)
    manager.rid_to_state = {sample.rid: sample.state for sample in samples}
    stream.cancel("another")
    assert sent == []
    stream.close()
    (message,) = sent
    assert not message.abort_all
    assert all(sample.rid.startswith(message.rid) for sample in samples)
    assert len(manager.rid_to_state) == 100, "SGLang's answers remove them"
    stream.close()
    assert len(sent) == 1


def test_a_group_is_cancelled_with_one_message() -> None:
    sent: list[Any] = []
    stream, samples = stream_of(manager_of({}, sent), 12)
    (other,) = stream._samples(GroupRequest(group_id="h", prompt_ids=[1], num_completions=1), 3)
    stream.cancel("g")
    (message,) = sent
    assert all(sample.rid.startswith(message.rid) for sample in samples)
    assert not other.rid.startswith(message.rid)


async def ended(sample: _Sample, stream: TokenStream, out: dict[str, Any]) -> SampledCompletion:
    sample.state.out_list = [out]
    sample.set()
    async for news in stream.news():
        return news[0]
    raise AssertionError


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
async def test_a_token_without_a_log_prob_does_not_fail_the_call(value: float | None) -> None:
    logprobs = [(-0.5, 7, None), (value, 8, None)]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": logprobs, "weight_version": "3"}
    stream, (sample, other) = stream_of(manager_of({}, []), 2)
    found = await ended(sample, stream, {"meta_info": meta, "output_ids": [7, 8]})
    assert found.token_ids == [7, 8]
    assert np.isfinite(found.logprobs).tolist() == [True, False]
    with pytest.raises(RuntimeError, match="2 tokens with log-probs"):
        await ended(other, stream, {"meta_info": meta | {"output_token_logprobs": logprobs[:1]}, "output_ids": [7, 8]})


async def test_parts_and_the_rest_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PART_TOKENS", 2)
    stream, (sample,) = stream_of(manager_of({}, []), 1)
    news = stream.news(0.001)
    assert await anext(news) == []
    sample.state.output_ids, sample.state.output_token_logprobs_val = [5], [-0.5]
    assert await anext(news) == []
    sample.state.output_ids, sample.state.output_token_logprobs_val = [5, 6, 7], [-0.5, -0.25]
    (part,) = await anext(news)
    assert (part.token_ids, part.logprobs, part.finish) == ([5, 6], [-0.5, -0.25], None)
    assert part.spans == [Span(start=0, end=2, policy_version=3)]
    versions = [{"version": "3", "start": 0, "end": 3}, {"version": "4", "start": 3, "end": 4}]
    meta = {"finish_reason": {"type": "length"}, "weight_version": "4", "weight_versions": versions, "cached_tokens": 9}
    meta["output_token_logprobs"] = [(value, 0, None) for value in (-0.5, -0.25, -1.0, -2.0)]
    rest = await ended(sample, stream, {"meta_info": meta, "output_ids": [5, 6, 7, 8]})
    assert (rest.token_ids, rest.logprobs, rest.finish) == ([7, 8], [-1.0, -2.0], Finish.LENGTH)
    assert rest.spans == [Span(start=0, end=1, policy_version=3), Span(start=1, end=2, policy_version=4)]
    assert rest.cached_tokens == 9


async def test_a_slow_completion_comes_in_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LOOKS_PER_PART", 3)
    stream, (sample,) = stream_of(manager_of({}, []), 1)
    sample.state.output_ids, sample.state.output_token_logprobs_val = [5, 6], [-0.5, -0.25]
    news = stream.news(0.001)
    assert [len(await anext(news)) for _ in range(4)] == [0, 0, 1, 0]


async def test_parts_of_a_group_that_are_submitted_later_end_with_its_message() -> None:
    sent: list[Any] = []
    stream, samples = stream_of(manager_of({}, sent), 2)
    later = stream._samples(GroupRequest(group_id="g", prompt_ids=[1], num_completions=3, prefixes={2: [7]}), 3)
    assert [(one.index, one.prefix) for one in later] == [(2, [7])]
    assert len({one.rid for one in [*samples, *later]}) == 3
    stream.cancel("g")
    (message,) = sent
    assert all(one.rid.startswith(message.rid) for one in [*samples, *later])


async def test_after_a_change_of_the_policy_no_parts_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PART_TOKENS", 2)
    version = [3]
    stream, (sample,) = stream_of(manager_of({}, []), 1)
    stream._version = lambda: version[0]
    sample.state.output_ids, sample.state.output_token_logprobs_val = [5, 6], [-0.5, -0.25]
    version[0] = 4
    assert await anext(stream.news(0.001)) == []


async def test_an_end_that_is_not_announced_yet_is_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PART_TOKENS", 2)
    # Of it the caller could not know that it must not continue.
    stream, (sample,) = stream_of(manager_of({}, []), 1)
    sample.state.output_ids, sample.state.output_token_logprobs_val = [5, 6], [-0.5, -0.25]
    sample.state.finished = True
    assert await anext(stream.news(0.001)) == []
