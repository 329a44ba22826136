"""The stream of a TrainStep call."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from servicekit.errors import InvalidRequest, TooLarge
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tests.unit.trainer.batches import message
from trainer_service.batch.receive import receive_chunks, receive_header


async def stream(requests: Sequence[pb.TrainStepRequest]) -> AsyncIterator[pb.TrainStepRequest]:
    for request in requests:
        yield request


def header(**fields: Any) -> pb.TrainStepRequest:
    return pb.TrainStepRequest(header=pb.TrainStepHeader(**dict[str, Any](step_id="s", num_samples=2) | fields))


CHUNK = pb.TrainStepRequest(chunk=message())


async def test_header_then_chunks() -> None:
    requests = stream([header(num_samples=4), CHUNK, CHUNK])
    step = await receive_header(requests, 4)
    await receive_chunks(requests, step)
    assert len(step.chunks) == 2


@pytest.mark.parametrize(
    ("requests", "error"),
    [
        ([], InvalidRequest),
        ([CHUNK], InvalidRequest),
        ([header(step_id="")], InvalidRequest),
        ([header(num_samples=5)], TooLarge),
    ],
)
async def test_bad_start_is_refused(requests: list[pb.TrainStepRequest], error: type[Exception]) -> None:
    with pytest.raises(error):
        await receive_header(stream(requests), 4)


@pytest.mark.parametrize("extra", [header(), CHUNK, pb.TrainStepRequest()])
async def test_what_was_not_announced_is_refused(extra: pb.TrainStepRequest) -> None:
    requests = stream([header(), CHUNK, extra])
    step = await receive_header(requests, 4)
    with pytest.raises(InvalidRequest):
        await receive_chunks(requests, step)
