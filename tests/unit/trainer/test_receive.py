"""The stream of a TrainStep call."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from servicekit.errors import InvalidRequest, TooLarge
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tests.unit.trainer.batches import LIMITS, message
from trainer_service.micro_batches.receive import receive_chunks, receive_header


async def stream(requests: Sequence[pb.TrainStepRequest]) -> AsyncIterator[pb.TrainStepRequest]:
    for request in requests:
        yield request


def header(**fields: Any) -> pb.TrainStepRequest:
    return pb.TrainStepRequest(header=pb.TrainStepHeader(**dict[str, Any](step_id="s", num_samples=2) | fields))


CHUNK = pb.TrainStepRequest(chunk=message())


async def test_header_then_chunks() -> None:
    requests = stream([header(num_samples=4), CHUNK, CHUNK])
    step = await receive_header(requests, 4)
    await receive_chunks(requests, step, LIMITS)
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
        await receive_chunks(requests, step, LIMITS)


EMPTY: dict[str, Any] = {
    "sample_ids": [],
    "prompt_lengths": [],
    "completion_lengths": [],
    "advantages": [],
    "trainable": [],
}
LONG = 2 * [LIMITS.longest]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (EMPTY | {"token_ids": [], "rollout_logprobs": []}, "chunk 1 has no samples"),
        (EMPTY, "chunk 1 has no samples"),
        ({"token_ids": [1] * 1000}, "token_ids has 1000 values, its 2 samples need 6"),
        ({"rollout_logprobs": [-1.0] * 1000}, "rollout_logprobs has 1000 values, its 2 samples need 3"),
        ({"loss_mask": [True] * 1000}, "loss_mask has 1000 values, its 2 samples need 3"),
        ({"advantages": [1.0] * 1000}, "advantages has 1000 values, its 2 samples need 2"),
        (
            {"prompt_lengths": LONG, "token_ids": [1] * (sum(LONG) + 3)},
            "sample 'b' has 18 tokens; the limit is 16 .the model's 16 positions",
        ),
    ],
)
async def test_a_chunk_is_refused_as_it_comes(changes: dict[str, Any], says: str) -> None:
    read = 0

    async def requests() -> AsyncIterator[pb.TrainStepRequest]:
        nonlocal read
        for request in [header(num_samples=1000), CHUNK, *[pb.TrainStepRequest(chunk=message(**changes))] * 5]:
            read += 1
            yield request

    stream = requests()
    step = await receive_header(stream, 1000)
    with pytest.raises(InvalidRequest, match=says):
        await receive_chunks(stream, step, LIMITS)
    assert read == 3
