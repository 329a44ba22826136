"""Step 6: scored groups to a train step: chosen samples, optimizer updates.

The trainer decides which samples go through the model together (trainer_service/micro_batches). Legend: P prompts, G
completions per prompt, S samples.

The age of a sample, its staleness, is a number of versions: from the policy that sampled its oldest token to the one
that trains on it.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tandem_clients.flow import Completion, Group, Sample, TrainBatch

Indices = NDArray[np.int64]


def oldest_versions(groups: Sequence[Group]) -> list[int]:
    """Return the oldest policy version of each sample, group by group: [S]."""
    return [completion.oldest_version for group in groups for completion in group.completions]


def staleness_histogram(versions: Iterable[int], current: int) -> dict[int, int]:
    """Count samples by age in versions.

    Args:
        versions: oldest version of each sample.
        current: version that trains on them.
    Returns: age (>= 0) to number of samples, ascending.
    Raises: ValueError: a version is newer than the current one.

    >>> staleness_histogram([7, 7, 5], current=7)
    {0: 2, 2: 1}
    """
    ages = Counter(current - version for version in versions)
    if ages and min(ages) < 0:
        raise ValueError(f"a sample carries version {current - min(ages)}, newer than the current version {current}")
    return dict(sorted(ages.items()))


def mean_ages(groups: Sequence[Group], current: int) -> tuple[float, float]:
    """Return the mean age of a token in versions: of the policy that sampled it, and of its context's oldest one.

    The second is larger behind a flip that has kept the KV cache, which is of older weights then.

    >>> one = Completion(token_ids=array("I", [5, 6, 7]), logprobs=array("f", 3 * [-1]), truncated=False,
    ...                  oldest_version=6, version_spans=((1, 6), (3, 7)))
    >>> mean_ages([Group(group_id="g", prompt=None, completions=(one,))], current=8)
    (1.3333333333333333, 2.0)
    """
    own = context = num_tokens = 0
    for group in groups:
        for completion in group.completions:
            begin = 0
            for end, version in completion.version_spans:
                own += (end - begin) * (current - version)
                begin = end
            context += begin * (current - completion.oldest_version)
            num_tokens += begin
    return own / max(num_tokens, 1), context / max(num_tokens, 1)


def stale_samples(groups: Sequence[Group], current: int, max_staleness: int) -> list[str]:
    """Return the ids of the samples that are too old to train on; in a synchronous iteration there should be none."""
    return [
        group.sample_id(index)
        for group in groups
        for index, completion in enumerate(group.completions)
        if current - completion.oldest_version > max_staleness
    ]


def without_tokens_before(completion: Completion, version: int) -> Completion:
    """Return a completion whose loss mask leaves out what policies before a version have sampled.

    >>> spans = ((2, 6), (3, 7))
    >>> one = Completion(token_ids=array("I", [5, 6, 7]), logprobs=array("f", 3 * [-1]), truncated=False,
    ...                  oldest_version=6, version_spans=spans)
    >>> list(without_tokens_before(one, 7).loss_mask)
    [0, 0, 1]
    """
    if completion.oldest_version >= version:
        return completion
    mask = completion.loss_mask
    mask = array("B", b"\1" * len(completion.token_ids) if mask is None else mask.tobytes())
    begin = 0
    for end, sampled_by in completion.version_spans:
        if sampled_by < version:
            mask[begin:end] = array("B", bytes(end - begin))
        begin = end
    return replace(completion, loss_mask=mask)


def select_samples(
    groups: Sequence[Group],
    advantages_PG: NDArray[np.float64],
    dropped_P: NDArray[np.bool_],
    *,
    truncated: Literal["keep", "mask"],
    missing_PG: NDArray[np.bool_] | None = None,
) -> list[Sample]:
    """Flatten groups to samples, leaving dropped groups out and masking truncated completions if asked to.

    Args:
        groups: P groups of G completions.
        advantages_PG: [P, G], from the statistics of *all* completions (masking comes after them).
        dropped_P: [P] True: leave the group out.
        truncated: "mask" makes completions that were cut off by the length limit not trainable.
        missing_PG: [P, G] True: leave the sample out, because it has no reward; None: there is none.
    """
    mask_truncated = truncated == "mask"
    if missing_PG is None:
        missing_PG = np.zeros(advantages_PG.shape, dtype=np.bool_)
    return [
        Sample(
            sample_id=group.sample_id(index),
            prompt=group.prompt,
            completion=completion,
            advantage=advantage,
            trainable=not (mask_truncated and completion.truncated),
        )
        for group, advantages_G, missing_G, dropped in zip(
            groups, advantages_PG.tolist(), missing_PG.tolist(), dropped_P.tolist(), strict=True
        )
        if not dropped
        for index, (completion, advantage, missing) in enumerate(
            zip(group.completions, advantages_G, missing_G, strict=True)
        )
        if not missing
    ]


def split_updates(num_samples: int, num_updates: int, rng: np.random.Generator) -> list[Indices]:
    """Spread samples over optimizer updates, in random order, in shares that differ by at most one sample.

    Returns: sample indices of each update; with fewer samples than updates, one update per sample.

    >>> [len(part) for part in split_updates(10, 4, np.random.default_rng(0))]
    [3, 3, 2, 2]
    >>> [len(part) for part in split_updates(2, 4, np.random.default_rng(0))]
    [1, 1]
    """
    if num_samples == 0:
        return []
    return np.array_split(rng.permutation(num_samples), min(num_updates, num_samples))


def split_groups(samples: Sequence[Sample], num_updates: int, rng: np.random.Generator) -> list[Indices]:
    """Spread groups over optimizer updates, in random order, in shares that differ by at most one group.

    Returns: sample indices of each update; with fewer groups than updates, one update per group.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    members = list(groups.values())
    shares = split_updates(len(members), num_updates, rng)
    return [np.array([index for group in share.tolist() for index in members[group]]) for share in shares]


def make_batch(
    samples: Sequence[Sample],
    *,
    step_id: str,
    policy_version: int,
    num_updates: int,
    rng: np.random.Generator,
    divide: Literal["samples", "prompts"] = "samples",
) -> TrainBatch:
    """Make one train step of the samples; it has fewer than `num_updates` updates if samples (groups) are fewer.

    Args:
        divide: what is divided among the updates; "prompts" keeps the samples of a group together.
        step_id: the step's name, by which the trainer recognises a repeated request.
    """
    if divide == "prompts":
        updates = split_groups(samples, num_updates, rng)
    else:
        updates = split_updates(len(samples), num_updates, rng)
    return TrainBatch(
        step_id=step_id,
        policy_version=policy_version,
        updates=tuple(tuple(samples[i] for i in members.tolist()) for members in updates),
    )
