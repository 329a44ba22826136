"""Turns SampleChunk messages into checked `Samples`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from servicekit.errors import InvalidRequest
from tandem_api.trainer.v1 import trainer_pb2
from trainer_service.micro_batches.checks import Limits, check
from trainer_service.micro_batches.samples import BoolArray, Number, Samples


def _flat(messages: Sequence[trainer_pb2.SampleChunk], field: str, dtype: type[Number]) -> NDArray[Number]:
    """Concatenate one repeated field of all messages."""
    parts: list[NDArray[Number]] = [
        np.fromiter(values, dtype, len(values)) for values in (getattr(m, field) for m in messages)
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def merge(messages: Sequence[trainer_pb2.SampleChunk], limits: Limits) -> Samples:
    """Join the messages of one step and check them.

    Raises: InvalidRequest: a message's fields have different lengths, or a sample is malformed.
    """
    for position, message in enumerate(messages):
        check_counts(message, position)
    samples = Samples(
        sample_ids=tuple(name for m in messages for name in m.sample_ids),
        update_index=np.repeat(
            np.array([m.update_index for m in messages], np.int64), [len(m.sample_ids) for m in messages]
        ),
        prompt_lengths=_flat(messages, "prompt_lengths", np.int64),
        completion_lengths=_flat(messages, "completion_lengths", np.int64),
        token_ids=_flat(messages, "token_ids", np.int64),
        rollout_logprobs=_flat(messages, "rollout_logprobs", np.float32),
        advantages=_flat(messages, "advantages", np.float32),
        trainable=_flat(messages, "trainable", np.bool_),
        loss_mask=_loss_mask(messages),
    )
    check(samples, limits)
    return samples


def _loss_mask(messages: Sequence[trainer_pb2.SampleChunk]) -> BoolArray:
    """Concatenate the masks, True for the tokens of messages that have none; empty if no message has one."""
    if not any(m.loss_mask for m in messages):
        return np.empty(0, np.bool_)
    masks = (m.loss_mask or [True] * len(m.rollout_logprobs) for m in messages)
    return np.concatenate([np.fromiter(mask, np.bool_, len(mask)) for mask in masks])


def check_counts(message: trainer_pb2.SampleChunk, position: int) -> None:
    """Check that the repeated fields of one message have the lengths that its samples imply. Raises: InvalidRequest."""
    num_samples = len(message.sample_ids)
    if num_samples == 0:
        raise InvalidRequest(f"chunk {position} has no samples; leave it out")
    completion = sum(message.completion_lengths)
    expected = {
        "prompt_lengths": num_samples,
        "completion_lengths": num_samples,
        "advantages": num_samples,
        "trainable": num_samples,
        "token_ids": sum(message.prompt_lengths) + completion,
        "rollout_logprobs": completion,
        **({"loss_mask": completion} if message.loss_mask else {}),
    }
    for field, count in expected.items():
        actual = len(getattr(message, field))
        if actual != count:
            raise InvalidRequest(
                f"chunk {position} (first sample {message.sample_ids[0]!r}): {field} has {actual} values, "
                f"its {num_samples} samples need {count}"
            )
