"""Reads the stream of a TrainStep call: a header, then chunks of samples, up to the announced number."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from servicekit.errors import InvalidRequest, TooLarge
from tandem_api.trainer.v1 import trainer_pb2 as pb
from trainer_service.micro_batches.checks import Limits, check_tokens
from trainer_service.micro_batches.merge import check_counts


@dataclass(kw_only=True)
class ReceivedStep:
    """Messages of one step, and the time at which the first arrived."""

    header: pb.TrainStepHeader
    chunks: list[pb.SampleChunk] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)


async def receive_header(requests: AsyncIterator[pb.TrainStepRequest], max_samples: int) -> ReceivedStep:
    """Read the first message.

    Args:
        max_samples: most samples of an iteration, by the configuration.
    Raises: InvalidRequest: it is not a valid header; TooLarge: it announces more samples than an iteration has.
    """
    async for request in requests:
        if request.WhichOneof("part") != "header":
            raise InvalidRequest("the first message of TrainStep must be the header")
        header = request.header
        if not header.step_id:
            raise InvalidRequest("step_id is empty; it makes a repeated call safe")
        if header.num_samples > max_samples:
            raise TooLarge(
                f"step {header.step_id!r} announces {header.num_samples} samples; the configuration has {max_samples} "
                "(grpo.prompts_per_iteration x group_size)"
            )
        return ReceivedStep(header=header)
    raise InvalidRequest("TrainStep got no message; send a header and chunks of samples")


async def receive_chunks(requests: AsyncIterator[pb.TrainStepRequest], step: ReceivedStep, limits: Limits) -> None:
    """Read the messages after the header into `step`, at most the announced samples with the tokens that they may have.

    Raises: InvalidRequest: at the first message that is no chunk, whose fields do not fit its samples, or that has too
        many samples or tokens.
    """
    num_samples = 0
    async for request in requests:
        if request.WhichOneof("part") != "chunk":
            raise InvalidRequest(
                f"message {len(step.chunks) + 1} of step {step.header.step_id!r} is no chunk of samples"
            )
        check_counts(request.chunk, len(step.chunks))
        check_tokens(request.chunk, limits)
        num_samples += len(request.chunk.sample_ids)
        if num_samples > step.header.num_samples:
            raise InvalidRequest(
                f"step {step.header.step_id!r} announces {step.header.num_samples} samples, at least {num_samples} came"
            )
        step.chunks.append(request.chunk)
