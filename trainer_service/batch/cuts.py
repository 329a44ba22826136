"""Deals samples to data-parallel ranks by the cost of their attention, and cuts their shares into micro-batches."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from trainer_service.batch.samples import BoolArray, IntArray, Samples

# A pipeline of p stages idles for (p - 1) of (m + p - 1) slots: two micro-batches per stage keep that under a third.
MICRO_BATCHES_PER_STAGE = 2
# Below this many tokens, the overhead per operator outweighs the gain of more micro-batches.
MIN_TOKENS_TO_SPLIT = 512
# Cuts are tried with this share of further micro-batches after those that do not fit.
_MORE = 1 / 16


def deal(samples: Samples, active: BoolArray, data_parallel: int, even_length: float) -> IntArray:
    """Choose the data-parallel rank of each sample, for the whole step: it is measured and trained on the same rank.

    The active samples of an update, and its others, are each dealt out by falling cost, to the rank that has least,
    so that every pass over them is balanced. Deterministic: every rank computes the same.

    Args:
        active: [S] whether a sample is trained on.
        even_length: tokens of a sequence whose attention costs as much as the rest of its layer.
    Returns: [S] ranks.
    """
    cost = samples.lengths * (1 + samples.lengths / even_length)
    owner = np.zeros(len(samples), np.int64)
    if data_parallel == 1:
        return owner
    keys = samples.update_index * 2 + active
    sums = [0.0] * data_parallel  # of all groups: equal ranks of a group are taken by it
    for key in np.unique(keys):
        group = np.flatnonzero(keys == key)
        loads = [(0.0, sums[rank], rank) for rank in range(data_parallel)]
        heapify(loads)
        for sample in group[np.argsort(-cost[group], kind="stable")].tolist():
            load, total, rank = loads[0]
            owner[sample] = rank
            heapreplace(loads, (load + cost[sample], total, rank))
        for load, _, rank in loads:
            sums[rank] += load
    return owner


def cut(
    shares: Sequence[IntArray], tokens: IntArray, *, max_tokens: int, pipeline_parallel: int, count_multiple: int = 1
) -> list[list[IntArray]]:
    """Cut each data-parallel rank's samples into micro-batches, equally many on all ranks.

    Args:
        shares: sample indices of each rank.
        tokens: [S] tokens of each sample in a row; one that has more than max_tokens is alone.
        max_tokens: most tokens of a micro-batch.
        count_multiple: the number of micro-batches is a multiple of this.
    Returns: by rank and micro-batch, sample indices by falling length; some are empty where a rank has few samples.
    """
    if not any(share.size for share in shares):
        return [[] for _ in shares]
    count = _fewest([tokens[share] for share in shares], max_tokens, pipeline_parallel)
    while True:
        count = -(-count // count_multiple) * count_multiple
        cuts = [_spread(share, tokens[share], count, max_tokens) for share in shares]
        found = [each for each in cuts if each is not None]
        if len(found) == len(cuts):
            return found
        count += max(1, int(count * _MORE))


def _fewest(shares: Sequence[NDArray[np.int64]], max_tokens: int, pipeline_parallel: int) -> int:
    """Return how many micro-batches the largest share needs at least, or more so that every stage has work."""
    most = max(int(share.sum()) for share in shares)
    count = max(1, -(-most // max_tokens))
    if pipeline_parallel == 1:
        return count
    wanted = min(MICRO_BATCHES_PER_STAGE * pipeline_parallel, max(share.size for share in shares))
    return max(count, min(wanted, most // MIN_TOKENS_TO_SPLIT))


def _spread(share: IntArray, tokens: IntArray, count: int, max_tokens: int) -> list[IntArray] | None:
    """Spread samples evenly, longest first, over `count` micro-batches; None: they do not fit."""
    loads = [(0, index) for index in range(count)]
    parts: list[list[int]] = [[] for _ in range(count)]
    for position in np.argsort(-tokens, kind="stable").tolist():
        load, index = loads[0]
        if load > 0 and load + tokens[position] > max_tokens:
            return None
        parts[index].append(int(share[position]))
        heapreplace(loads, (load + int(tokens[position]), index))
    return [np.array(part, np.int64) for part in parts]
