"""Turns SampleChunk messages into checked `Samples`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from servicekit.errors import InvalidRequest
from servicekit.rpc.arrays import KINDS, array_length, read_array
from tandem_api.trainer.v1 import trainer_pb2
from trainer_service.micro_batches.checks import Limits, check
from trainer_service.micro_batches.samples import BoolArray, Number, Samples


def _flat(messages: Sequence[trainer_pb2.SampleChunk], field: str, dtype: type[Number]) -> NDArray[Number]:
    """Concatenate one array of all messages, which is a repeated field, or bytes (servicekit/rpc/arrays.py)."""
    read = read_array if field.endswith(KINDS) else getattr
    parts = [np.array(read(message, field), dtype) for message in messages]
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
        token_ids=_flat(messages, "token_ids_u32", np.int64),
        rollout_logprobs=_flat(messages, "rollout_logprobs_f32", np.float32),
        advantages=_flat(messages, "advantages", np.float32),
        trainable=_flat(messages, "trainable", np.bool_),
        loss_mask=_loss_mask(messages),
        continues=_continues(messages),
    )
    check(samples, limits)
    return samples


def _loss_mask(messages: Sequence[trainer_pb2.SampleChunk]) -> BoolArray:
    """Concatenate the masks, True for the tokens of messages that have none; empty if no message has one."""
    masks = [np.array(read_array(message, "loss_mask_u8"), np.bool_) for message in messages]
    if not any(mask.size for mask in masks):
        return np.empty(0, np.bool_)
    completions = [sum(message.completion_lengths) for message in messages]
    return np.concatenate(
        [mask if mask.size else np.ones(n, np.bool_) for mask, n in zip(masks, completions, strict=True)]
    )


def _continues(messages: Sequence[trainer_pb2.SampleChunk]) -> BoolArray:
    """Concatenate the flags, False for the samples of messages that have none; empty if no message has one."""
    if not any(message.continues for message in messages):
        return np.empty(0, np.bool_)
    flags = [np.array(message.continues or [False] * len(message.sample_ids), np.bool_) for message in messages]
    return np.concatenate(flags)


def check_counts(message: trainer_pb2.SampleChunk, position: int) -> None:
    """Check that the repeated fields of one message have the lengths that its samples imply. Raises: InvalidRequest."""
    num_samples = len(message.sample_ids)
    if num_samples == 0:
        raise InvalidRequest(f"chunk {position} has no samples; leave it out")
    place = f"chunk {position} (first sample {message.sample_ids[0]!r})"
    completion = sum(message.completion_lengths)
    expected = dict.fromkeys(("prompt_lengths", "completion_lengths", "advantages", "trainable"), num_samples)
    actual = {field: len(getattr(message, field)) for field in expected}
    try:
        for field in ("token_ids_u32", "rollout_logprobs_f32", "loss_mask_u8"):
            actual[field.rpartition("_")[0]] = array_length(message, field)
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error}") from None
    expected |= {"token_ids": sum(message.prompt_lengths) + completion, "rollout_logprobs": completion}
    expected |= {"loss_mask": completion} if actual["loss_mask"] else {}
    if message.continues:
        expected["continues"], actual["continues"] = num_samples, len(message.continues)
    for field, count in expected.items():
        if actual[field] != count:
            raise InvalidRequest(f"{place}: {field} has {actual[field]} values, its {num_samples} samples need {count}")
