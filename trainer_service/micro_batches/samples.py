"""The samples of one train step, as flat arrays and as the bytes that rank 0 sends to the other ranks.

Legend: S samples, T completion tokens of all samples, N tokens (prompts and completions) of all samples.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)

# Token ids fit in the type in which they are sent; checks.py refuses others.
NUM_IDS = 2**31
# The arrays of `Samples`, in the order and types in which they are sent to the other ranks.
_DTYPES: Mapping[str, type[np.generic]] = {
    "update_index": np.int64,
    "prompt_lengths": np.int64,
    "completion_lengths": np.int64,
    # Most of the bytes; an index of torch needs int64, so that it is that again in the ranks.
    "token_ids": np.int32,
    "rollout_logprobs": np.float32,
    "advantages": np.float32,
    "trainable": np.bool_,
    "loss_mask": np.bool_,
    "continues": np.bool_,
}


def starts(lengths: IntArray) -> IntArray:
    """Return the first index of each of the consecutive spans with these lengths.

    >>> starts(np.array([3, 1, 2])).tolist()
    [0, 3, 4]
    """
    return np.cumsum(lengths) - lengths


def span_indices(first: IntArray, lengths: IntArray) -> IntArray:
    """Return the indices of the spans [first_i, first_i + length_i), one span after the other.

    >>> span_indices(np.array([10, 20]), np.array([2, 3])).tolist()
    [10, 11, 20, 21, 22]
    """
    return np.repeat(first - starts(lengths), lengths) + np.arange(int(lengths.sum()))


def by_value(indices: IntArray, values: IntArray) -> list[IntArray]:
    """Split indices by their values, each part in their order.

    >>> [part.tolist() for part in by_value(np.array([4, 5, 6]), np.array([1, 0, 1]))]
    [[5], [4, 6]]
    """
    order = np.argsort(values, kind="stable")
    return np.split(indices[order], np.flatnonzero(np.diff(values[order])) + 1) if indices.size else []


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples of one step, in the order of arrival; ragged fields are flattened in sample order."""

    sample_ids: tuple[str, ...]
    update_index: IntArray  # [S] optimizer update, 0-based
    prompt_lengths: IntArray  # [S]
    completion_lengths: IntArray  # [S]
    token_ids: IntArray  # [N] each sample's prompt, then its completion
    rollout_logprobs: FloatArray  # [T] at the sampling temperature, as the engine gave them
    advantages: FloatArray  # [S]
    trainable: BoolArray  # [S] False: in no loss, but in the denominators
    # [T] False: not the policy's token; it is read, and in no loss, denominator or metric. Empty: all are the policy's
    loss_mask: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))
    # [S] True: a further sequence of the episode of the sample before. Empty: none is
    continues: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))

    def __len__(self) -> int:
        return len(self.sample_ids)

    def to_parts(self) -> list[bytes]:
        """Serialise the samples for `from_parts`: names, then each array."""
        arrays = [getattr(self, name).astype(dtype, copy=False).tobytes() for name, dtype in _DTYPES.items()]
        return [json.dumps(self.sample_ids).encode(), *arrays]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> "Samples":
        """Build samples from `to_parts`; the arrays are copies, which torch may write to."""
        names, *arrays = parts
        fields: dict[str, Any] = {
            name: np.frombuffer(part, dtype).copy() for (name, dtype), part in zip(_DTYPES.items(), arrays, strict=True)
        }
        fields["token_ids"] = fields["token_ids"].astype(np.int64)
        return cls(sample_ids=tuple(json.loads(names)), **fields)

    @cached_property
    def lengths(self) -> IntArray:
        """[S] tokens of prompt and completion."""
        return self.prompt_lengths + self.completion_lengths

    @cached_property
    def token_starts(self) -> IntArray:
        """[S] index of each sample's first token in `token_ids`."""
        return starts(self.lengths)

    @cached_property
    def completion_starts(self) -> IntArray:
        """[S] index of each sample's first completion token in [T] arrays."""
        return starts(self.completion_lengths)

    @cached_property
    def prompt_index(self) -> IntArray:
        """[S] number of each sample's prompt: equal for samples whose prompts have equal tokens."""
        numbers: dict[bytes, int] = {}
        ends = self.token_starts + self.prompt_lengths
        prompts = (self.token_ids[first:end].tobytes() for first, end in zip(self.token_starts, ends, strict=True))
        return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], np.int64)

    @cached_property
    def episode(self) -> IntArray:
        """[S] number of each sample's episode; an episode has one sample, or several sequences."""
        numbers: IntArray = np.cumsum(~self.continues) - 1 if self.continues.size else np.arange(len(self))
        return numbers

    @cached_property
    def counted_lengths(self) -> IntArray:
        """[S] completion tokens of each sample that are the policy's."""
        if not self.loss_mask.size:
            return self.completion_lengths
        owner = self.per_token(np.arange(len(self)))
        return np.bincount(owner[self.loss_mask], minlength=len(self))

    @cached_property
    def engine_not_finite(self) -> BoolArray:
        """[T] the policy's tokens for which the engine gave no log-prob that is a finite number."""
        bad = ~np.isfinite(self.rollout_logprobs)
        return bad & self.loss_mask if self.loss_mask.size else bad

    @property
    def num_completion_tokens(self) -> int:
        """T, the completion tokens of all samples."""
        return int(self.rollout_logprobs.size)

    def of_update(self, update: int) -> IntArray:
        """Return the indices of the samples of one optimizer update, ascending."""
        return np.flatnonzero(self.update_index == update)

    def per_token(self, values: NDArray[Number]) -> NDArray[Number]:
        """Repeat [S] values for each completion token: [T]."""
        return np.repeat(values, self.completion_lengths)


def reordered(
    samples: Samples, num_updates: int, key: Sequence[int], divide: Literal["samples", "prompts"] = "samples"
) -> Samples:
    """Assign episodes to updates anew, at random, in shares that differ by at most one episode (one prompt).

    The second and later epochs of a step use it. Every rank, and a run that resumes, gets the same order from the same
    key.

    Args:
        num_updates: of the epoch, at most as many as samples.
        divide: what is divided; episodes, if there are fewer prompts than updates.
        key: numbers that are not negative: the run's seed, the number of the step and of the epoch.
    """
    together = samples.episode
    first = np.flatnonzero(np.diff(together, prepend=-1))  # [E] the first sequence of each episode
    _, prompts = np.unique(samples.prompt_index[first], return_inverse=True)
    if divide == "prompts" and prompts.max() + 1 >= num_updates:
        together = prompts[together]
    updates = np.empty(int(together.max()) + 1, np.int64)
    order = np.random.default_rng(key).permutation(updates.size)
    for update, numbers in enumerate(np.array_split(order, num_updates)):
        updates[numbers] = update
    return replace(samples, update_index=updates[together])
