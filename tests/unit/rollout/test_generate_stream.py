"""Generate over real gRPC, around a fake engine: what is submitted, held, continued, cancelled and refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from rollout_service import servicer as servicer_module
from servicekit.errors import REASON_KEY, Unavailable
from servicekit.rpc.arrays import packed, read_array
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_api.weights.v1 import weights_pb2
from tests.unit.rollout.test_servicer import Served
from tests.unit.rollout.test_updates import a_round
from weightsync.round.phases import COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY

TOKENS = 4
DEADLINE_S = 10.0


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(servicer_module, "NEWS_S", 0.05)
    made = Served()
    await made.start()
    yield made
    await made.server.drain(0.0)


class Stream:
    """The caller's end of a Generate call."""

    def __init__(self, served: Served) -> None:
        self.call = served.stub.Generate(timeout=DEADLINE_S)

    async def submit(self, *groups: pb.PromptGroup, lowest: int = 1, highest: int | None = 1, **fields: Any) -> None:
        request = pb.GenerateRequest(groups=groups, min_policy_version=lowest, **fields)
        if highest is not None:
            request.max_policy_version = highest
        await self.call.write(request)

    async def until_it_runs(self, served: Served) -> None:
        """Until the engine has what was submitted."""
        while not served.engine.running:
            assert isinstance(await self.call.read(), pb.GenerateResponse)

    async def until_it_leaves(self) -> None:
        """Until the replica has said that it ends."""
        while not (response := await self.call.read()).load.leaving:
            assert isinstance(response, pb.GenerateResponse)

    async def results(self, num: int) -> list[pb.GroupResult]:
        """The next so many results."""
        found: list[pb.GroupResult] = []
        while len(found) < num:
            response = await self.call.read()
            assert isinstance(response, pb.GenerateResponse), await self.call.details()
            found += response.groups
        return found

    async def end(self) -> None:
        """Read to the end."""
        while isinstance(await self.call.read(), pb.GenerateResponse):
            pass

    async def refusal(self) -> tuple[grpc.StatusCode, str, str]:
        """Code, reason and text of the error that ends the call."""
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.end()
        reason = dict(refused.value.trailing_metadata() or ()).get(REASON_KEY, "")
        return refused.value.code(), str(reason), refused.value.details() or ""


@asynccontextmanager
async def stream_of(served: Served, **sampling: Any) -> AsyncIterator[tuple[Stream, pb.ReplicaLoad]]:
    """An open stream, and the load with which it begins."""
    stream = Stream(served)
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": TOKENS, **sampling}
    await stream.call.write(pb.GenerateRequest(sampling=pb.SamplingParams(**fields)))
    try:
        first = await stream.call.read()
        yield stream, first.load if isinstance(first, pb.GenerateResponse) else pb.ReplicaLoad()
    finally:
        stream.call.cancel()


def group(name: str, num: int = 2, prefixes: dict[int, list[int]] | None = None, **fields: Any) -> pb.PromptGroup:
    samples = [
        pb.SamplePrefix(index=index, token_ids_u32=packed("token_ids_u32", tokens))
        for index, tokens in (prefixes or {}).items()
    ]
    return pb.PromptGroup(
        group_id=name, prompt_ids_u32=packed("prompt_ids_u32", [1, 2]), num_completions=num, **fields, samples=samples
    )


def bare(name: str, num: int, prefixes: dict[int, list[int]]) -> pb.PromptGroup:
    """A group without its prompt."""
    asked = group(name, num, prefixes)
    asked.prompt_ids_u32 = b""
    return asked


def other_prompt(ids: list[int]) -> pb.PromptGroup:
    """A group of which the second completion follows another prompt."""
    samples = [pb.SamplePrefix(index=0), pb.SamplePrefix(index=1, prompt_ids_u32=packed("prompt_ids_u32", ids))]
    asked = group("a", 2)
    asked.samples.extend(samples)
    return asked


async def test_groups_are_submitted_while_others_run(served: Served) -> None:
    async with stream_of(served) as (stream, load):
        assert (load.kv_tokens, load.policy_version, load.paused, load.running) == (1024, 1, False, 0)
        await stream.submit(group("a"), group("b"))
        assert [one.group_id for one in await stream.results(2)] == ["a", "b"]
        await stream.submit(group("c", 3))
        (found,) = await stream.results(1)
        assert [one.index for one in found.completions] == [0, 1, 2]
        for completion in found.completions:
            assert read_array(completion, "token_ids_u32").tolist() == [1] * TOKENS
            assert completion.finish_reason == pb.FINISH_REASON_LENGTH
        await stream.submit(group("a"))  # it has ended: its name is free again
        await stream.results(1)
        assert (await served.stub.GetStatus(pb.GetStatusRequest(), timeout=5.0)).running_groups == 0
    assert served.registry.get_sample_value("tandem_generated_tokens_total") == (2 + 2 + 3 + 2) * TOKENS


async def test_a_completion_continues_after_the_tokens_that_it_has(served: Served) -> None:
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a", 3, {1: [1, 1, 1], 2: []}))
        (found,) = await stream.results(1)
    assert {one.index: len(one.token_ids_u32) // 4 for one in found.completions} == {1: 1, 2: TOKENS}


@pytest.mark.parametrize(
    ("sampling", "asked", "says"),
    [
        ({}, group("a", 2, {2: []}), "group 'a', sample 2: each of the 2 completions is asked for at most once"),
        ({}, group("a", 2, {1: [1] * TOKENS}), "sample 1 has 4 tokens already; max_new_tokens is too few for more"),
        ({}, group("a", 2, {1: [1, 100]}), "sample 1: token_ids[1] is 100; the vocabulary has 100 tokens"),
        ({}, other_prompt([5, 100]), "group 'a', sample 1: prompt_ids[1] is 100; the vocabulary has 100 tokens"),
        ({}, other_prompt([5] * 1024), "group 'a', sample 1: 1024 prompt tokens and max_new_tokens 4 are 1028 tokens"),
        ({"repetition_penalty": 1.5}, group("a", 2, {1: [1]}), "with stop or repetition_penalty it must begin anew"),
        ({"stop": ["x"]}, group("a", 2, {1: [1]}), "with stop or repetition_penalty it must begin anew"),
        ({}, group("", 2), "groups[0].group_id is empty"),
        ({"temperature": 1e-9}, group("a"), "sampling.temperature is 1e-09"),
    ],
)
async def test_what_is_wrong_is_named(
    served: Served, sampling: dict[str, Any], asked: pb.PromptGroup, says: str
) -> None:
    stream = Stream(served)
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": TOKENS, **sampling}
    await stream.call.write(pb.GenerateRequest(sampling=pb.SamplingParams(**fields), groups=[asked]))
    code, _, text = await stream.refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert says in text


async def test_a_name_that_runs_is_refused(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"))
        await stream.submit(group("a"))
        code, _, text = await stream.refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "group 'a': completion 0 runs already" in text


async def test_other_completions_of_a_group_that_runs_can_be_submitted(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a", 3, {0: []}))
        await stream.submit(group("a", 3, {2: [1]}))
        await stream.until_it_runs(served)
        served.engine.release()
        found = [one for result in await stream.results(2) for one in result.completions]
        assert {one.index: len(one.token_ids_u32) // 4 for one in found} == {0: TOKENS, 2: TOKENS - 1}
        assert (await served.stub.GetStatus(pb.GetStatusRequest(), timeout=5.0)).running_groups == 0


async def test_a_prompt_comes_once_and_is_kept_for_what_follows_until_a_cancel(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a", 3, {0: []}, keeps_prompt=True))
        while (response := await stream.call.read()).accepted < 1:
            assert isinstance(response, pb.GenerateResponse)
        await stream.submit(bare("a", 3, {2: [1]}))
        while len(served.engine.running) < 2:
            assert isinstance(await stream.call.read(), pb.GenerateResponse)
        assert {tuple(one.prompt_ids) for one in served.engine.submitted} == {(1, 2)}
        held = served.servicer._admission.held_tokens
        served.engine.release()
        await stream.results(2)
        assert 0 < served.servicer._admission.held_tokens == 2 < held  # the prompt's, nothing else
        await stream.submit(bare("a", 3, {1: []}))  # none of it runs, and still
        await stream.results(1)
        await stream.call.write(pb.GenerateRequest(cancel=["a"]))
        await stream.submit(bare("a", 3, {1: []}))
        code, _, text = await stream.refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "group 'a': prompt_ids is empty" in text
    assert served.servicer._admission.held_tokens == 0


async def test_a_completion_that_runs_is_refused(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a", 3, {0: [], 1: []}))
        await stream.submit(group("a", 3, {2: [], 1: []}))
        code, _, text = await stream.refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "group 'a': completion 1 runs already" in text


async def test_more_groups_than_the_limit_are_refused(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(*(group(str(i)) for i in range(4)))
        await stream.submit(*(group(str(i)) for i in range(4, 9)))
        code, reason, _ = await stream.refusal()
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_LARGE")


@pytest.mark.parametrize(
    ("lowest", "highest", "says"),
    [
        (2, 2, "asked for policy version 2, but rollout-0 serves version 1"),
        (2, None, "asked for policy version 2 or newer, but"),
        (0, 0, "asked for policy version 0, but"),
    ],
)
async def test_another_version_than_asked_for_is_refused(
    served: Served, lowest: int, highest: int | None, says: str
) -> None:
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"), lowest=lowest, highest=highest)
        code, reason, text = await stream.refusal()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_VERSION")
    assert says in text


async def test_a_newer_version_is_taken_if_no_highest_is_given(served: Served) -> None:
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"), lowest=0, highest=None)
        await stream.results(1)


async def test_what_is_submitted_in_a_pause_waits_for_its_end_and_the_new_version(served: Served) -> None:
    async with stream_of(served) as (stream, _):
        for phase in (PREPARE, PAUSE):
            await served.updates.run_phase(phase, a_round("r", 2))
        await stream.submit(group("a"), lowest=2, highest=2)
        while not (response := await stream.call.read()).load.paused:
            assert not response.groups
        assert served.updates.state == weights_pb2.REPLICA_STATE_PAUSED
        for phase in (TRANSFER, VERIFY, COMMIT):
            await served.updates.run_phase(phase, a_round("r", 2))
        (found,) = await stream.results(1)
        assert {span.policy_version for one in found.completions for span in one.version_spans} == {2}


async def test_a_pause_that_aborts_returns_what_runs(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"))
        await stream.until_it_runs(served)
        await asyncio.wait_for(served.updates.pause(weights_pb2.PAUSE_MODE_ABORT_REQUEUE), 5.0)
        (found,) = await stream.results(1)
        assert {one.finish_reason for one in found.completions} == {pb.FINISH_REASON_ABORT}
        await stream.submit(group("a"))  # it waits here
        served.engine.hold()
        served.engine.release()
        await served.updates.resume()
        (found,) = await stream.results(1)
        assert {one.finish_reason for one in found.completions} == {pb.FINISH_REASON_LENGTH}


async def test_one_message_ends_a_group(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"), group("b"))
        await stream.call.write(pb.GenerateRequest(cancel=["a", "unknown"]))
        (found,) = await stream.results(1)
        assert (found.group_id, {one.finish_reason for one in found.completions}) == ("a", {pb.FINISH_REASON_ABORT})
        served.engine.release()
        assert [one.group_id for one in await stream.results(1)] == ["b"]


async def test_a_stream_that_is_given_up_leaves_nothing_running(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"))
        await stream.until_it_runs(served)
    async with asyncio.timeout(5.0):
        while served.engine.running:  # noqa: ASYNC110 - the fake's tasks end by themselves
            await asyncio.sleep(0.01)
    assert (await served.stub.GetStatus(pb.GetStatusRequest(), timeout=5.0)).running_groups == 0


async def test_a_replica_that_shuts_down_finishes_what_runs_and_then_ends_the_stream(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"))
        await stream.until_it_runs(served)
        assert not await served.servicer.until_idle(0.0)
        served.servicer.leave()
        async with stream_of(served) as (late, load):  # of a coordinator that does not know it yet
            assert load.leaving
            await late.end()
            assert await late.call.code() is grpc.StatusCode.OK
        await stream.until_it_leaves()
        served.engine.release()
        assert [one.group_id for one in await stream.results(1)] == ["a"]
        await stream.end()
        assert await stream.call.code() is grpc.StatusCode.OK
        assert await served.servicer.until_idle(DEADLINE_S)


async def test_what_runs_on_a_replica_that_shuts_down_can_be_taken_back(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"))
        await stream.until_it_runs(served)
        served.servicer.leave()
        await stream.until_it_leaves()
        await stream.call.write(pb.GenerateRequest(cancel=["a"]))
        (found,) = await stream.results(1)
        assert {one.finish_reason for one in found.completions} == {pb.FINISH_REASON_ABORT}
        await stream.end()
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_replica_that_shuts_down_waits_for_the_end_of_a_weight_sync(served: Served) -> None:
    await served.updates.run_phase(PREPARE, a_round("r2", 2))
    served.servicer.leave()
    assert not await served.servicer.until_idle(0.0)
    for phase in (PAUSE, TRANSFER, VERIFY, COMMIT):
        await served.updates.run_phase(phase, a_round("r2", 2))
    assert await served.servicer.until_idle(0.0)


async def test_an_eviction_ends_the_stream_with_its_reason(served: Served) -> None:
    served.engine.hold()
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"))
        await stream.until_it_runs(served)
        served.updates._pauses.evict(Unavailable("the engine stands still"))
        code, _, text = await stream.refusal()
    assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the engine stands still")


async def test_a_stream_whose_caller_has_said_everything_ends(served: Served) -> None:
    async with stream_of(served) as (stream, _):
        await stream.submit(group("a"))
        await stream.call.done_writing()
        await stream.results(1)
        await stream.end()
        assert await stream.call.code() is grpc.StatusCode.OK
