"""Step 6: scored groups to a train step: chosen samples, optimizer updates, micro-batches.

Legend: P prompts, G completions per prompt, S samples. Lengths and plans are NumPy; the wire messages are filled from
the samples' arrays at the end, the only place that knows protobuf.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.flow import Completion, Group, Prompt, TrainBatch
from tandem_api.trainer.v1 import trainer_pb2

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion, ready to train on."""

    sample_id: str
    prompt: Prompt
    completion: Completion
    advantage: float
    # False: counts in no loss but keeps its place in the denominators (a masked truncation).
    trainable: bool

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids)


def select_samples(
    groups: Sequence[Group],
    advantages_PG: NDArray[np.float64],
    dropped_P: NDArray[np.bool_],
    *,
    truncated: Literal["keep", "mask"],
) -> list[Sample]:
    """Flatten groups to samples, leaving dropped groups out and masking truncated completions if asked to.

    Args:
        groups: P groups of G completions.
        advantages_PG: [P, G], from the statistics of *all* completions (masking comes after them).
        dropped_P: [P] True: leave the group out.
        truncated: "mask" makes completions that were cut off by the length limit not trainable.
    """
    mask_truncated = truncated == "mask"
    return [
        Sample(
            sample_id=group.sample_id(index),
            prompt=group.prompt,
            completion=completion,
            advantage=advantage,
            trainable=not (mask_truncated and completion.truncated),
        )
        for group, advantages_G, dropped in zip(groups, advantages_PG.tolist(), dropped_P.tolist(), strict=True)
        if not dropped
        for index, (completion, advantage) in enumerate(zip(group.completions, advantages_G, strict=True))
    ]


def split_updates(num_samples: int, num_updates: int, rng: np.random.Generator) -> list[Indices]:
    """Spread whole samples over optimizer updates, in random order, in shares that differ by at most one.

    Never returns an empty update: with fewer samples than updates there are fewer updates.

    >>> [len(part) for part in split_updates(10, 4, np.random.default_rng(0))]
    [3, 3, 2, 2]
    >>> [len(part) for part in split_updates(2, 4, np.random.default_rng(0))]
    [1, 1]
    """
    if num_samples == 0:
        return []
    return np.array_split(rng.permutation(num_samples), min(num_updates, num_samples))


def cut_micro_batches(lengths_S: Indices, max_tokens: int) -> list[Indices]:
    """Cut samples into micro-batches of at most `max_tokens` padded tokens, longest first so that padding is small.

    Args:
        lengths_S: [S] tokens of each sample.
        max_tokens: bound on (samples * longest sample) of a micro-batch.
    Returns: positions in lengths_S; each position occurs once.
    Raises: ValueError: a sample alone is longer than max_tokens.

    >>> [part.tolist() for part in cut_micro_batches(np.array([2, 6, 5, 2]), 12)]
    [[1, 2], [0, 3]]
    """
    order = np.argsort(-lengths_S, kind="stable")
    parts: list[Indices] = []
    start = 0
    while start < len(order):
        longest = int(lengths_S[order[start]])
        if longest > max_tokens:
            raise ValueError(
                f"a sample of {longest} tokens does not fit trainer.max_tokens_per_micro_batch = {max_tokens}: raise it"
            )
        parts.append(order[start : start + max_tokens // longest])
        start += max_tokens // longest
    return parts


def pack(
    samples: Sequence[Sample],
    *,
    step_id: str,
    policy_version: int,
    num_updates: int,
    max_tokens: int,
    rng: np.random.Generator,
) -> TrainBatch:
    """Pack samples into one train step; `num_updates` of the result is smaller where samples are fewer.

    Raises: ValueError: a sample alone exceeds `max_tokens` padded tokens.
    """
    lengths_S = np.fromiter((sample.num_tokens for sample in samples), dtype=np.int64, count=len(samples))
    updates = split_updates(len(samples), num_updates, rng)
    micro_batches = tuple(
        _micro_batch(update_index, [samples[i] for i in members[part].tolist()])
        for update_index, members in enumerate(updates)
        for part in cut_micro_batches(lengths_S[members], max_tokens)
    )
    return TrainBatch(
        step_id=step_id,
        policy_version=policy_version,
        num_samples=len(samples),
        num_updates=len(updates),
        micro_batches=micro_batches,
    )


def _micro_batch(update_index: int, samples: Sequence[Sample]) -> trainer_pb2.MicroBatch:
    """The wire form of samples that go through the model together; ragged fields flattened in sample order."""
    message = trainer_pb2.MicroBatch(
        update_index=update_index,
        sample_ids=[sample.sample_id for sample in samples],
        prompt_lengths=[len(sample.prompt.token_ids) for sample in samples],
        completion_lengths=[len(sample.completion.token_ids) for sample in samples],
        advantages=[sample.advantage for sample in samples],
        trainable=[sample.trainable for sample in samples],
    )
    for sample in samples:
        message.token_ids.extend(sample.prompt.token_ids)
        message.token_ids.extend(sample.completion.token_ids)
        message.rollout_logprobs.extend(sample.completion.logprobs)
    return message
