"""SampleChunk messages to samples, and the errors that name what is wrong."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from servicekit.errors import InvalidRequest
from tests.unit.trainer.batches import LIMITS, message, random_samples
from trainer_service.micro_batches.checks import Limits, check_updates
from trainer_service.micro_batches.merge import merge
from trainer_service.micro_batches.samples import Samples


def test_messages_are_joined_in_order() -> None:
    samples = merge([message(), message(update_index=1, sample_ids=["c", "d"])], LIMITS)
    assert samples.sample_ids == ("a", "b", "c", "d")
    assert samples.update_index.tolist() == [0, 0, 1, 1]
    assert samples.token_starts.tolist() == [0, 3, 6, 9]
    assert samples.completion_starts.tolist() == [0, 1, 3, 4]
    assert samples.per_token(samples.advantages).tolist() == [1, -1, -1, 1, -1, -1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample_ids": []}, "no samples"),
        ({"advantages": [1.0]}, "advantages has 1 values"),
        ({"trainable": [True] * 3}, "trainable has 3 values"),
        ({"token_ids": [1, 2, 3, 4, 5]}, "token_ids has 5 values"),
        ({"rollout_logprobs": [0.0]}, "rollout_logprobs has 1 values"),
        ({"sample_ids": ["a", "a"]}, "'a' occurs more than once"),
        ({"completion_lengths": [0, 3]}, "'a' has an empty completion"),
        ({"prompt_lengths": [3, 0]}, "'b' has an empty prompt"),
        ({"token_ids": [1, 2, 3, 4, 10, 6]}, "'b': token id 10 at position 1 is beyond the vocabulary of 10"),
        ({"advantages": [1.0, math.nan]}, "'b': advantage nan"),
        ({"rollout_logprobs": [-0.1, -0.2, -math.inf]}, "'b': rollout log-prob -inf of completion token 1"),
        ({"loss_mask": [True, False]}, "loss_mask has 2 values, its 2 samples need 3"),
        ({"loss_mask": [True, False, False]}, "'b': loss_mask masks all of its 2 completion tokens"),
        (
            {"loss_mask": [True, False, True], "rollout_logprobs": [-0.1, math.nan, math.inf]},
            "'b': rollout log-prob inf of completion token 1",
        ),
    ],
)
def test_malformed_sample_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        merge([message(**changes)], LIMITS)
    assert said in str(error.value)


def test_messages_with_and_without_a_mask_are_joined() -> None:
    plain = message(sample_ids=["c", "d"])
    masked = message(loss_mask=[True, False, True], rollout_logprobs=[-0.1, math.nan, -0.3])  # NaN of a masked token
    samples = merge([plain, masked], LIMITS)
    assert samples.loss_mask.tolist() == [True, True, True, True, False, True]
    assert samples.counted_lengths.tolist() == [1, 2, 1, 1]
    assert Samples.from_parts(samples.to_parts()).loss_mask.tolist() == samples.loss_mask.tolist()


def test_without_a_mask_all_tokens_count_and_no_byte_is_sent() -> None:
    samples = merge([message()], LIMITS)
    assert samples.counted_lengths.tolist() == [1, 2]
    assert samples.to_parts()[-1] == b""
    assert Samples.from_parts(samples.to_parts()).counted_lengths.tolist() == [1, 2]


@pytest.mark.parametrize(("max_positions", "max_tokens"), [(2, 64), (64, 2)])
def test_too_long_sample_is_named_with_the_limit(max_positions: int, max_tokens: int) -> None:
    limits = Limits(vocab_size=10, max_positions=max_positions, max_tokens=max_tokens)
    with pytest.raises(InvalidRequest, match=r"'a' has 3 tokens; the limit is 2"):
        merge([message()], limits)


@pytest.mark.parametrize(
    ("updates", "num_updates", "announced", "said"),
    [
        ([0, 1], 2, 3, "announces 3 samples, 2 came"),
        ([1, 0], 2, 2, "must ascend"),
        ([0, 2], 2, 2, "update_index 2 is not below num_updates 2"),
        ([0, 2], 3, 2, "updates [1] of 3 have no samples"),
        ([0, 0], 0, 2, "num_updates is 0"),
    ],
)
def test_updates_must_be_complete_and_in_order(updates: list[int], num_updates: int, announced: int, said: str) -> None:
    samples = random_samples(2, update_index=np.array(updates))
    with pytest.raises(InvalidRequest) as error:
        check_updates(samples, num_updates, announced)
    assert said in str(error.value)


def test_ranks_get_token_ids_in_four_bytes_and_index_with_eight() -> None:
    largest, limits = 2**31 - 1, replace(LIMITS, vocab_size=2**32)
    sent = merge([message(token_ids=[1, 2, largest, 4, 5, 6])], limits)
    parts = sent.to_parts()
    assert len(parts[4]) == 4 * 6
    received = Samples.from_parts(parts)
    assert received.token_ids.tolist() == [1, 2, largest, 4, 5, 6]
    assert received.token_ids.dtype == sent.token_ids.dtype == np.int64
    with pytest.raises(InvalidRequest, match="token id 2147483648 at position 2"):
        merge([message(token_ids=[1, 2, largest + 1, 4, 5, 6])], limits)
