"""How many batches the trainer's service holds, and which it holds on to: none of those that it did not train."""

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from servicekit.errors import NotFinite, Unavailable
from servicekit.rpc.server import GrpcServer
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tests.fakes.trainer_servicer import TrainerServicer
from tests.kit.waiting import until
from tests.unit.trainer.batches import message
from tests.unit.trainer.test_fenced_calls import NEW, OLD, FakeCommander, FakeEngine, led_by
from trainer_service.micro_batches.receive import ReceivedStep
from trainer_service.servicer import MAX_BATCHES

SERVICE = "tandem_api.trainer.v1.TrainerService"
KINDS = (ReceivedStep, pb.SampleChunk, pb.TrainStepRequest)


def header(step_id: str = "s", **changes: Any) -> pb.TrainStepRequest:
    fields: dict[str, Any] = {"num_updates": 1, "num_samples": 2, "fence": NEW, "policy_version": 0} | changes
    return pb.TrainStepRequest(header=pb.TrainStepHeader(step_id=step_id, **fields))


async def stream(first: pb.TrainStepRequest, more: asyncio.Event | None = None) -> AsyncIterator[pb.TrainStepRequest]:
    yield first
    if more is not None:
        await more.wait()
    yield pb.TrainStepRequest(chunk=message())


def fails(replies: "Future[list[bytes]]", case: str) -> None:
    if case == "not finite":
        replies.set_exception(NotFinite("the loss is NaN"))
    else:
        replies.set_result([b"\xff"])  # not what a rank says


CASES: dict[str, dict[str, Any]] = {
    "another version": {"policy_version": 5},
    "an evicted coordinator": {"fence": OLD},
    "too many samples": {"num_samples": 3},
    "not finite": {},
    "a bug": {},
    "cancelled": {},
}


@pytest.mark.parametrize("case", CASES)
async def test_a_step_that_is_not_trained_is_not_kept(case: str, tmp_path: Path) -> None:
    commander, server = FakeCommander(), GrpcServer("trainer")
    servicer = TrainerServicer(commander, max_samples=8, run_dir=tmp_path)
    servicer.serve_engine(FakeEngine(), led_by(NEW))  # type: ignore[arg-type]
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, SERVICE)
    gc.collect()
    gc.disable()
    before = held()
    try:
        async with grpc.aio.insecure_channel(await server.start()) as channel:
            call = trainer_pb2_grpc.TrainerServiceStub(channel).TrainStep(stream(header(**CASES[case])), timeout=10)
            if case in ("not finite", "a bug"):
                await commander.submitted.get()
                fails(commander.replies[0], case)
            elif case == "cancelled":
                await commander.submitted.get()
                call.cancel()
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await call
            del call
        await asyncio.to_thread(until, lambda: held() <= before, 5)
    finally:
        gc.enable()
        await server.drain(0)


def held() -> int:
    return sum(isinstance(one, KINDS) for one in gc.get_objects())


@pytest.fixture
def servicer(tmp_path: Path) -> TrainerServicer:
    made = TrainerServicer(FakeCommander(), max_samples=8, run_dir=tmp_path)
    made.serve_engine(FakeEngine(), led_by(NEW))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("received", [False, True])
async def test_more_steps_than_fit_are_refused_for_now(servicer: TrainerServicer, received: bool) -> None:
    more = asyncio.Event()
    calls = [
        asyncio.create_task(servicer.TrainStep(stream(header(f"s{index}"), more), None)) for index in range(MAX_BATCHES)
    ]
    await asyncio.sleep(0)
    if received:  # and nobody waits for them any more
        more.set()
        for _ in calls:
            await servicer._commander.submitted.get()  # type: ignore[attr-defined]
        for call in calls:
            call.cancel()
    with pytest.raises(Unavailable, match="at most 4 together, call again"):
        await servicer.TrainStep(stream(header("another")), None)
    if received:
        done = pb.TrainStepResponse(policy_version=1, metrics={"loss": 0.0, "grad_norm": 0.0}).SerializeToString()
        for replies in servicer._commander.replies:  # type: ignore[attr-defined]
            replies.set_result([done])
        await asyncio.gather(*servicer._steps.values())
    else:
        for call in calls:
            call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    goes_on = asyncio.create_task(servicer.TrainStep(stream(header("another")), None))
    await servicer._commander.submitted.get()  # type: ignore[attr-defined]
    goes_on.cancel()
