"""What every RolloutEngine does, on the fake that other tests use and on real SGLang."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from rollout_service.engine import (
    Finish,
    GroupRequest,
    RolloutEngine,
    SampledCompletion,
    SampledGroup,
    SamplingSettings,
    Span,
)
from tandem_config.schema import RunConfig
from tests.kit.models import VOCABULARY, make_model
from tests.unit.rollout.fake_engine import FakeEngine, generate_groups

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

DEADLINE_S = 30.0


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=["fake", pytest.param("sglang", marks=pytest.mark.integration)],
)
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, module_redis: str
) -> AsyncIterator[RolloutEngine]:
    if request.param == "fake":
        yield FakeEngine(num_ranks=1)
        return
    from rollout_service.sglang_engine.engine import SglangEngine

    environment = dict(os.environ)
    model: Path = make_model(tmp_path_factory.mktemp("model") / "m")
    config = RunConfig.model_validate(
        {"model": {"path": str(model)}, "data": {"train": "unused"}, "rollout": {"max_total_tokens": 20000}}
    )
    made = SglangEngine(
        config,
        "rollout-0",
        redis_url=module_redis,
        group="contract",
        host="127.0.0.1",
        run_dir=model.parent,
        on_terminate=lambda: None,
    )
    try:
        await made.start()
        yield made
    finally:
        await made.shutdown()
        await made.shutdown()  # idempotent
        os.environ.clear()
        os.environ.update(environment)


def sampling(max_new_tokens: int = 4) -> SamplingSettings:
    return SamplingSettings(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=max_new_tokens, stop_token_ids=())


def groups(num: int, completions: int = 2) -> list[GroupRequest]:
    return [GroupRequest(group_id=str(i), prompt_ids=[7, 8, 9 + i], num_completions=completions) for i in range(num)]


async def collect(engine: RolloutEngine, asked: list[GroupRequest], max_new_tokens: int = 4) -> list[SampledGroup]:
    async with asyncio.timeout(DEADLINE_S):
        return [group async for part in generate_groups(engine, asked, sampling(max_new_tokens)) for group in part]


async def test_limits_are_known(engine: RolloutEngine) -> None:
    assert engine.limits.vocab_size in (100, VOCABULARY)
    assert engine.limits.longest_request > 0
    assert len(engine.rank_addresses) == 1


async def test_each_group_comes_once_and_whole(engine: RolloutEngine) -> None:
    found = await collect(engine, groups(5))
    assert sorted(group.group_id for group in found) == ["0", "1", "2", "3", "4"]
    for completion in (c for group in found for c in group.completions):
        assert len(completion.token_ids) == len(completion.logprobs) == 4
        assert completion.finish is Finish.LENGTH
        assert all(logprob <= 0 for logprob in completion.logprobs)
    assert {len(group.completions) for group in found} == {2}


async def test_calls_run_side_by_side(engine: RolloutEngine) -> None:
    found = await asyncio.gather(*(collect(engine, groups(2)) for _ in range(4)))
    assert [len(each) for each in found] == [2] * 4


async def test_tokens_carry_the_version_that_was_set(engine: RolloutEngine) -> None:
    await engine.set_version(7)
    (group,) = await collect(engine, groups(1))
    for completion in group.completions:
        (span,) = completion.spans
        assert (span.start, span.end, span.policy_version) == (0, 4, 7)


async def test_an_idle_engine_updates_and_flushes(engine: RolloutEngine) -> None:
    await engine.begin_update()
    await engine.end_update()
    assert await engine.flush_cache()
    assert await collect(engine, groups(1))


async def test_aborted_requests_end_with_abort(engine: RolloutEngine) -> None:
    if isinstance(engine, FakeEngine):
        engine.hold()
    running = asyncio.create_task(collect(engine, groups(2), max_new_tokens=400))
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        while not running.done():  # an abort may come before the requests
            await engine.abort_running()
            await asyncio.wait({running}, timeout=0.05)
    assert {c.finish for group in await running for c in group.completions} == {Finish.ABORT}


async def test_a_closed_iterator_leaves_nothing_running(engine: RolloutEngine) -> None:
    if isinstance(engine, FakeEngine):
        engine.hold()
    running = asyncio.create_task(collect(engine, groups(2), max_new_tokens=400))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await engine.flush_cache(DEADLINE_S / 2)  # True only when no request is held
    if isinstance(engine, FakeEngine):
        engine.release()


async def test_frozen_requests_go_on_after_thaw(engine: RolloutEngine) -> None:
    if isinstance(engine, FakeEngine):
        engine.hold()
    running = asyncio.create_task(collect(engine, groups(2), max_new_tokens=200))
    await asyncio.sleep(0.05)
    await engine.freeze()
    if isinstance(engine, FakeEngine):
        engine.release()
    await engine.begin_update()
    await engine.end_update()
    assert not await engine.flush_cache()
    await engine.thaw()
    assert {len(c.token_ids) for group in await running for c in group.completions} == {200}


async def test_retracted_requests_hold_no_cache_and_continue_as_if_they_had(engine: RolloutEngine) -> None:
    asked = GroupRequest(group_id="g", prompt_ids=[7, 8, 9], num_completions=2, seed=5)
    (whole,) = await collect(engine, [asked], max_new_tokens=200)
    await engine.set_version(8)
    if isinstance(engine, FakeEngine):
        engine.hold()
    running = asyncio.create_task(collect(engine, [asked], max_new_tokens=200))
    await asyncio.sleep(0.05)
    await engine.freeze()
    for _ in range(2):
        await engine.retract()
    if isinstance(engine, FakeEngine):
        engine.release()
    assert await engine.flush_cache()
    assert not running.done()
    await engine.set_version(9)
    await engine.thaw()
    (group,) = await running
    for one, before in zip(group.completions, whole.completions, strict=True):
        assert (one.token_ids, one.finish) == (before.token_ids, Finish.LENGTH)
        assert one.logprobs == pytest.approx(before.logprobs, abs=1e-4)
        assert [span.start for span in one.spans] == [0, *(span.end for span in one.spans[:-1])]
        assert (one.spans[-1].end, one.spans[-1].policy_version) == (200, 9)


async def test_a_seeded_completion_continues_as_if_it_had_not_been_interrupted(engine: RolloutEngine) -> None:
    asked = GroupRequest(group_id="g", prompt_ids=[7, 8, 9], num_completions=3, seed=5)
    (whole,) = await collect(engine, [asked], max_new_tokens=90)
    tokens = [one.token_ids for one in whole.completions]
    prefixes = {0: tokens[0][:50], 2: tokens[2][:1]}
    (rest,) = await collect(engine, [replace(asked, prefixes=prefixes)], max_new_tokens=90)
    assert [one.index for one in rest.completions] == [0, 2]
    assert [[*prefixes[one.index], *one.token_ids] for one in rest.completions] == [tokens[0], tokens[2]]
    assert [len(one.logprobs) for one in rest.completions] == [40, 89]
    # One that follows another prompt, whose last token is the first of its own ones here.
    other = replace(asked, prefixes={2: [9, tokens[2][0]], 0: tokens[0][:50]}, prompts={2: [7, 8]})
    (rest,) = await collect(engine, [other], max_new_tokens=90)
    found = {one.index: one.token_ids for one in rest.completions}
    assert found == {0: tokens[0][50:], 2: tokens[2][1:89]}


async def test_parts_and_the_end_are_the_whole(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(engine, FakeEngine):
        monkeypatch.setattr("rollout_service.sglang_engine.dispatch.PART_TOKENS", 50)
    version = 7
    await engine.set_version(version)
    asked = GroupRequest(group_id="g", prompt_ids=[7, 8, 9], num_completions=2, seed=5)
    (whole,) = await collect(engine, [asked], max_new_tokens=300)
    stream = engine.open_stream(sampling(300))
    found: list[SampledCompletion] = []
    try:
        await stream.submit([asked])
        async with asyncio.timeout(DEADLINE_S):
            async for news in stream.news(0.02):
                found += news
                if sum(one.finish is not None for one in found) == 2:
                    break
    finally:
        stream.close()
    if not isinstance(engine, FakeEngine):
        assert len(found) > 2
    for completion in whole.completions:
        parts = [part for part in found if part.index == completion.index]
        assert [token for part in parts for token in part.token_ids] == completion.token_ids
        assert [part.finish for part in parts] == [*[None] * (len(parts) - 1), Finish.LENGTH]
        for part in parts:
            assert len(part.logprobs) == len(part.token_ids)
            assert part.spans == [Span(start=0, end=len(part.token_ids), policy_version=version)] or not part.token_ids


async def test_a_cancelled_group_ends_and_the_others_do_not(engine: RolloutEngine) -> None:
    if isinstance(engine, FakeEngine):
        engine.hold()
    stream = engine.open_stream(sampling(400))
    found: dict[str, set[Finish | None]] = {}
    try:
        await stream.submit(groups(2))
        async with asyncio.timeout(DEADLINE_S):
            async for news in stream.news(0.02):
                stream.cancel("0")
                for one in news:
                    if one.finish is not None:
                        found.setdefault(one.group_id, set()).add(one.finish)
                if isinstance(engine, FakeEngine) and found:
                    engine.release()
                if len(found) == 2:
                    break
    finally:
        stream.close()
    assert found == {"0": {Finish.ABORT}, "1": {Finish.LENGTH}}
    assert await engine.flush_cache(DEADLINE_S / 2)


async def test_an_engine_at_rest_says_so(engine: RolloutEngine) -> None:
    await collect(engine, groups(3))
    assert engine.load().requests == 0
    assert engine.load().waiting_requests == 0
    assert 0.0 <= engine.load().kv_cache_usage <= 1.0
