"""Checks whether samples can be trained on: every error names the sample, its value and the limit."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servicekit.errors import InvalidRequest
from servicekit.rpc.arrays import array_length
from tandem_api.trainer.v1 import trainer_pb2
from trainer_service.micro_batches.samples import NUM_IDS, Samples


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of samples, by the loaded model and the settings."""

    vocab_size: int
    max_positions: int  # tokens of the longest sequence
    max_tokens: int  # of one micro-batch
    # The engine's log-prob of every token is needed: it is pi_old, and one that is not finite is to end the step.
    needs_engine_logprobs: bool = True

    @property
    def longest(self) -> int:
        """Most tokens of a sample."""
        return min(self.max_positions, self.max_tokens)

    def too_long(self, num_tokens: int) -> str:
        """Say why a sample with so many tokens cannot be trained on."""
        return (
            f"has {num_tokens} tokens; the limit is {self.longest} (the model's {self.max_positions} positions, "
            f"trainer.max_tokens_per_micro_batch {self.max_tokens})"
        )


def _first(bad: NDArray[np.bool_]) -> int | None:
    """Return the index of the first True, or None."""
    index = int(bad.argmax()) if bad.size else 0
    return index if bad.size and bad[index] else None


def check(samples: Samples, limits: Limits) -> None:
    """Check that every sample can be trained on.

    Raises: InvalidRequest: names the first sample that breaks a rule.
    """
    _check_names(samples)
    _check_episodes(samples)
    _check_lengths(samples, limits)
    _check_masks(samples)
    _check_ids(samples, limits)
    _check_finite(samples, limits)


def check_tokens(message: trainer_pb2.SampleChunk, limits: Limits) -> None:
    """Check a message's number of tokens, before it is kept for the others; its fields fit its samples.

    Raises: InvalidRequest: its samples cannot have so many; with the longest.
    """
    if array_length(message, "token_ids_u32") > len(message.sample_ids) * limits.longest:
        lengths = [sum(pair) for pair in zip(message.prompt_lengths, message.completion_lengths, strict=True)]
        longest = max(lengths)
        raise InvalidRequest(f"sample {message.sample_ids[lengths.index(longest)]!r} {limits.too_long(longest)}")


def _check_names(samples: Samples) -> None:
    if len(set(samples.sample_ids)) == len(samples):
        return
    seen: set[str] = set()
    for name in samples.sample_ids:
        if name in seen:
            raise InvalidRequest(f"sample id {name!r} occurs more than once in the step; ids must be unique")
        seen.add(name)


def _check_episodes(samples: Samples) -> None:
    index = (
        _first(samples.continues & (np.diff(samples.update_index, prepend=-1) != 0)) if samples.continues.size else None
    )
    if index is not None:
        raise InvalidRequest(
            f"sample {samples.sample_ids[index]!r} continues an episode, and is the first of update "
            f"{samples.update_index[index]}; all sequences of an episode belong to one update"
        )


def _check_lengths(samples: Samples, limits: Limits) -> None:
    rules: list[tuple[NDArray[np.bool_], Callable[[int], str]]] = [
        (samples.prompt_lengths == 0, lambda i: "has an empty prompt; the first token needs something before it"),
        (samples.completion_lengths == 0, lambda i: "has an empty completion; leave the sample out"),
        (samples.lengths > limits.longest, lambda i: limits.too_long(int(samples.lengths[i]))),
    ]
    for bad, message in rules:
        index = _first(bad)
        if index is not None:
            raise InvalidRequest(f"sample {samples.sample_ids[index]!r} {message(index)}")


def _check_masks(samples: Samples) -> None:
    index = _first(samples.counted_lengths == 0)
    if index is not None:
        raise InvalidRequest(
            f"sample {samples.sample_ids[index]!r}: loss_mask masks all of its {samples.completion_lengths[index]} "
            "completion tokens, so that there is nothing to train on; leave the sample out"
        )


def _check_ids(samples: Samples, limits: Limits) -> None:
    index = _first(samples.token_ids >= min(limits.vocab_size, NUM_IDS))
    if index is None:
        return
    owner = int(np.searchsorted(samples.token_starts, index, side="right")) - 1
    raise InvalidRequest(
        f"sample {samples.sample_ids[owner]!r}: token id {samples.token_ids[index]} at position "
        f"{index - samples.token_starts[owner]} is beyond the vocabulary of {limits.vocab_size}; "
        "check that rollout and trainer use the same tokenizer"
    )


def _check_finite(samples: Samples, limits: Limits) -> None:
    index = _first(~np.isfinite(samples.advantages))
    if index is not None:
        raise InvalidRequest(
            f"sample {samples.sample_ids[index]!r}: advantage {samples.advantages[index]} is not finite"
        )
    index = _first(samples.engine_not_finite & samples.per_token(samples.trainable))
    if index is not None and limits.needs_engine_logprobs:
        owner = int(np.searchsorted(samples.completion_starts, index, side="right")) - 1
        raise InvalidRequest(
            f"sample {samples.sample_ids[owner]!r}: rollout log-prob {samples.rollout_logprobs[index]} of completion "
            f"token {index - samples.completion_starts[owner]} is not finite"
        )


def check_updates(samples: Samples, num_updates: int, num_samples: int) -> None:
    """Check that the step has the announced number of samples, and samples for each update, in ascending order.

    Raises: InvalidRequest: it has not.
    """
    if num_updates < 1:
        raise InvalidRequest("num_updates is 0; a train step has at least 1 update")
    if len(samples) != num_samples:
        raise InvalidRequest(
            f"the header announces {num_samples} samples, {len(samples)} came; was the stream cut off?"
        )
    if np.any(np.diff(samples.update_index) < 0):
        raise InvalidRequest(f"update_index must ascend; got {_distinct(samples.update_index)}")
    present = set(samples.update_index.tolist())
    wrong = sorted(present - set(range(num_updates)))
    if wrong:
        raise InvalidRequest(f"update_index {wrong[0]} is not below num_updates {num_updates}")
    missing = sorted(set(range(num_updates)) - present)
    if missing:
        raise InvalidRequest(f"updates {missing} of {num_updates} have no samples")


def _distinct(values: Iterable[int]) -> list[int]:
    out: list[int] = []
    for value in values:
        if not out or out[-1] != value:
            out.append(int(value))
    return out[:16]
