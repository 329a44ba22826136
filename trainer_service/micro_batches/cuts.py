"""Deals samples to data-parallel ranks by the cost of their attention, and cuts their shares into micro-batches."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from trainer_service.micro_batches.groups import costs, divided
from trainer_service.micro_batches.samples import BoolArray, IntArray, Samples, by_value

# A pipeline of p stages idles for (p - 1) of (m + p - 1) slots: two micro-batches per stage keep that under a third.
MICRO_BATCHES_PER_STAGE = 2
# Below this many tokens, the overhead per operator outweighs the gain of more micro-batches.
MIN_TOKENS_TO_SPLIT = 512
# Cuts are tried with this share of further micro-batches after those that do not fit.
_MORE = 1 / 16


def deal(
    samples: Samples, active: BoolArray, data_parallel: int, even_length: float, *, share_prompts: bool = False
) -> IntArray:
    """Choose the data-parallel rank of each sample, for the whole step: it is measured and trained on the same rank.

    The active samples of an update, and its others, are each dealt out by falling cost, to the rank that has least. So
    every pass over them is balanced. With shared prompts the samples of one prompt stay together, or are divided so
    that the rank with the most work has least. Deterministic: every rank computes the same.

    Args:
        active: [S] whether a sample is trained on.
        even_length: tokens of a sequence whose attention costs as much as the rest of its layer.
    Returns: [S] ranks.
    """
    owner = np.zeros(len(samples), np.int64)
    if data_parallel == 1:
        return owner
    keys = samples.update_index * 2 + active
    sums = np.zeros(data_parallel)  # of all passes: equal ranks of a pass are taken by it
    for rows in by_value(np.arange(len(samples)), keys):
        ways = _ways(samples, rows, data_parallel) if share_prompts else [np.split(rows, rows.size)]
        found = [_deal_groups(samples, groups, sums, even_length) for groups in ways]
        groups, ranks, loads = min(found, key=lambda way: float(way[2].max()))
        owner[np.concatenate(groups)] = np.repeat(ranks, [group.size for group in groups])
        sums += loads
    return owner


def _ways(samples: Samples, rows: IntArray, data_parallel: int) -> list[list[IntArray]]:
    """Return the ways to divide samples that are tried: by prompt, and prompts in 2, 4, ... parts."""
    groups = by_value(rows, samples.prompt_index[rows])
    return [divided(groups, 2**power) for power in range(data_parallel.bit_length())]


def _deal_groups(
    samples: Samples, groups: list[IntArray], sums: NDArray[np.float64], even_length: float
) -> tuple[list[IntArray], IntArray, NDArray[np.float64]]:
    """Deal groups of samples to ranks. Returns: the groups, the rank of each, what each rank got."""
    cost = costs(samples, groups, even_length)
    ranks = np.zeros(len(groups), np.int64)
    loads = [(0.0, float(total), rank) for rank, total in enumerate(sums)]
    heapify(loads)
    for group in np.argsort(-cost, kind="stable").tolist():
        load, total, rank = loads[0]
        ranks[group] = rank
        heapreplace(loads, (load + float(cost[group]), total, rank))
    got = np.zeros(sums.size)
    for load, _, rank in loads:
        got[rank] = load
    return groups, ranks, got


def cut(
    shares: Sequence[IntArray], *, max_tokens: int, pipeline_parallel: int, count_multiple: int = 1
) -> list[list[IntArray]]:
    """Cut each data-parallel rank's groups of samples into micro-batches, equally many on all ranks.

    Args:
        shares: tokens of each rank's groups in a row; a group that has more than max_tokens is alone.
        max_tokens: most tokens of a micro-batch.
        count_multiple: the number of micro-batches is a multiple of this.
    Returns: by rank and micro-batch, numbers of the rank's groups by falling length; none where a rank has few.
    """
    if not any(share.size for share in shares):
        return [[] for _ in shares]
    count = _fewest(shares, max_tokens, pipeline_parallel)
    while True:
        count = -(-count // count_multiple) * count_multiple
        cuts = [_spread(share, count, max_tokens) for share in shares]
        found = [parts for parts in cuts if parts is not None]
        if len(found) == len(cuts):
            return found
        count += max(1, int(count * _MORE))


def _fewest(shares: Sequence[IntArray], max_tokens: int, pipeline_parallel: int) -> int:
    """Return how many micro-batches the largest share needs at least, or more so that every stage has work."""
    most = max(int(share.sum()) for share in shares)
    count = max(1, -(-most // max_tokens))
    if pipeline_parallel == 1:
        return count
    wanted = min(MICRO_BATCHES_PER_STAGE * pipeline_parallel, max(share.size for share in shares))
    return max(count, min(wanted, most // MIN_TOKENS_TO_SPLIT))


def _spread(tokens: IntArray, count: int, max_tokens: int) -> list[IntArray] | None:
    """Spread groups evenly, longest first, over `count` micro-batches; None: they do not fit."""
    order = np.argsort(-tokens, kind="stable")
    if count == 1:
        return [order] if order.size == 1 or tokens.sum() <= max_tokens else None
    loads = [(0, index) for index in range(count)]
    parts: list[list[int]] = [[] for _ in range(count)]
    for group, size in zip(order.tolist(), tokens[order].tolist(), strict=True):
        load, index = loads[0]
        if load > 0 and load + size > max_tokens:
            return None
        parts[index].append(group)
        heapreplace(loads, (load + size, index))
    return [np.array(part, np.int64) for part in parts]
