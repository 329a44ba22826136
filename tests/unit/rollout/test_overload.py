"""A replica that is offered more than it holds: refused for now, while what runs and what controls it goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from rollout_service import open_stream
from rollout_service.weight_updates import admission
from servicekit.errors import RETRY_KEY
from servicekit.lifecycle import tasks
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_api.weights.v1 import weights_pb2
from tests.unit.rollout.test_generate_stream import Stream, group, served, stream_of
from tests.unit.rollout.test_servicer import Served
from tests.unit.rollout.test_updates import a_round
from weightsync.round.phases import PREPARE

__all__ = ["served"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_TOKENS", 600)
    monkeypatch.setattr(open_stream, "_CACHES", 0)


async def refused(stream: Stream) -> str:
    """The text with which a stream ends; it must say when to come again."""
    code, reason, text = await stream.refusal()
    assert (code.name, reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
    assert dict(await stream.call.trailing_metadata())[RETRY_KEY] == "1000"
    return text


async def test_more_than_a_replica_holds_is_refused_and_the_rest_goes_on(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (first, _), stream_of(served) as (second, _):
        await first.submit(*(group(f"g{number}") for number in range(4)))  # 4 * (2 + 2 * 64) tokens
        await first.until_it_runs(served)
        await second.submit(group("more"))
        assert await refused(second) == "520 tokens of requests are held here; no room for 130, submit later"
        status = await served.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        assert status.running_groups == 4
        await served.stub.PauseGeneration(pb.PauseGenerationRequest(mode=weights_pb2.PAUSE_MODE_KEEP_KV), timeout=5)
        await served.stub.ResumeGeneration(pb.ResumeGenerationRequest(), timeout=5)
        round_ = weights_pb2.RunPhaseRequest(phase=PREPARE, round=a_round("r", 2))
        await served.rounds.RunPhase(round_, timeout=5)
        served.engine.release()
        assert len(await first.results(4)) == 4
        async with stream_of(served) as (third, _):
            await third.submit(group("more"))
            assert [found.group_id for found in await third.results(1)] == ["more"]
    assert served.servicer._admission.held_tokens == 0


async def test_what_a_stream_held_when_it_was_cancelled_makes_room(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (first, _):
        await first.submit(*(group(f"g{number}") for number in range(4)))
        await first.until_it_runs(served)
    served.engine.release()
    async with stream_of(served) as (second, _):
        await second.submit(*(group(f"g{number}") for number in range(4)))
        assert len(await second.results(4)) == 4


async def test_one_message_alone_is_never_too_much(served: Served) -> None:
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a", 20))
        assert len(await stream.results(1)) == 1


async def test_a_call_whose_items_end_as_it_is_cancelled_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    warned = list[str]()
    monkeypatch.setattr(
        tasks.log, "warning", lambda event, **fields: warned.append(f"{event}: {fields}"), raising=False
    )
    begun = asyncio.Event()

    async def items() -> AsyncIterator[int]:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        for none in list[int]():
            yield none

    async def call() -> list[int]:
        return [item async for item in admission.Admission().until_evicted(items())]

    task = asyncio.create_task(call())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert warned == []
