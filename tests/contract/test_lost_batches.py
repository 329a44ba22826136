"""A train step that fails leaves no batch in the coordinator's memory: without a collector of cycles."""

import gc
import weakref
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest

from servicekit import errors
from servicekit.errors import TandemError
from servicekit.rpc.server import GrpcServer
from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_clients.flow import Completion, Prompt, Sample, TrainBatch
from tandem_clients.trainer import Trainer

SERVICE = "tandem_api.trainer.v1.TrainerService"


class Refuses(trainer_pb2_grpc.TrainerServiceServicer):
    """Its other methods are the generated ones."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def TrainStep(self, request_iterator: AsyncIterator[Any], context: Any) -> trainer_pb2.TrainStepResponse:
        raise self.error

    async def ComputeLogprobs(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            raise self.error
        yield


@pytest.mark.parametrize("call", ["train_step", "logprobs"])
@pytest.mark.parametrize("kind", ["WrongVersion", "Unavailable", "NotFinite", "Internal", "gone"])
async def test_a_failed_step_leaves_no_batch(kind: str, call: str) -> None:
    server = GrpcServer("trainer")
    servicer = Refuses(getattr(errors, kind, errors.Internal)("no"))  # type: ignore[abstract]
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, SERVICE)
    trainer = Trainer(await server.start())
    if kind == "gone":
        await server.drain(0)
    gc.collect()
    gc.disable()
    others = num_chunks()  # of tests before this one in the same process
    try:
        kept = await failed(trainer, call)
        assert kept() is None
        assert num_chunks() == others
    finally:
        gc.enable()
        await trainer.close()
        await server.drain(0)


def num_chunks() -> int:
    return sum(isinstance(one, trainer_pb2.SampleChunk) for one in gc.get_objects())


class Batch(TrainBatch):
    """One that can be watched; the product's has slots."""

    __slots__ = ("__weakref__",)


async def failed(trainer: Trainer, call: str) -> "weakref.ref[Batch]":
    samples = tuple(sample_of(index) for index in range(3))
    batch = Batch(step_id="s", policy_version=0, updates=(samples,))
    with pytest.raises(TandemError):
        await (trainer.train_step(batch) if call == "train_step" else trainer.logprobs(samples))
    return weakref.ref(batch)


def sample_of(index: int) -> Sample:
    completion = Completion(
        token_ids=array("I", [1]),
        logprobs=array("f", [-1.0]),
        truncated=False,
        oldest_version=0,
        version_spans=((1, 0),),
    )
    prompt = Prompt(row=index, token_ids=array("I", [1]), answer="")
    return Sample(sample_id=str(index), prompt=prompt, completion=completion, advantage=0.0, trainable=True)
