"""Deals samples to data-parallel ranks, and cuts a rank's samples into micro-batches by a budget of padded tokens."""

import numpy as np

from trainer_service.batch.samples import BoolArray, IntArray, Samples, span_indices

# A pipeline of p stages idles for (p - 1) of (m + p - 1) slots: two micro-batches per stage keep that under a third.
MICRO_BATCHES_PER_STAGE = 2
# Below this many padded tokens, the overhead per operator outweighs the gain of more micro-batches.
MIN_TOKENS_TO_SPLIT = 512


def deal(samples: Samples, active: BoolArray, data_parallel: int) -> IntArray:
    """Choose the data-parallel rank of each sample, for the whole step: it is measured and trained on the same rank.

    The active samples of an update, and its others, are each sorted by length and dealt out in turn, so that every pass
    over them is balanced. Deterministic: every rank computes the same.

    Args:
        active: [S] whether a sample is trained on.
    Returns: [S] ranks.
    """
    order = np.lexsort((-samples.lengths, active, samples.update_index))
    keys = samples.update_index[order] * 2 + active[order]
    _, sizes = np.unique(keys, return_counts=True)
    owner = np.empty(len(samples), np.int64)
    owner[order] = span_indices(np.zeros(sizes.size, np.int64), sizes) % data_parallel
    return owner


def cut(rows: IntArray, lengths: IntArray, *, max_tokens: int, pipeline_parallel: int) -> list[IntArray]:
    """Cut samples into micro-batches of rows of similar length.

    Args:
        rows: indices of the samples.
        lengths: [len(rows)] tokens of each, none above max_tokens.
        max_tokens: most padded tokens of a micro-batch: its rows times its longest row.
    Returns: sample indices of each micro-batch.
    """
    order = np.argsort(-lengths, kind="stable")
    rows, lengths = rows[order], lengths[order]
    budget = _budget(lengths, max_tokens, pipeline_parallel)
    return [rows[a:b] for a, b in _spans(lengths, budget)]


def _budget(lengths: IntArray, max_tokens: int, pipeline_parallel: int) -> int:
    """Choose the padded tokens per micro-batch: the limit, or less so that every pipeline stage has work."""
    if pipeline_parallel == 1 or lengths.size == 0:
        return max_tokens
    share = -(-int(lengths.sum()) // (MICRO_BATCHES_PER_STAGE * pipeline_parallel))
    return min(max_tokens, max(share, MIN_TOKENS_TO_SPLIT, int(lengths[0])))


def _spans(lengths: IntArray, budget: int) -> list[tuple[int, int]]:
    """Split descending lengths into runs with rows * longest <= budget."""
    out, start = [], 0
    while start < lengths.size:
        rows = max(1, budget // int(lengths[start]))
        out.append((start, min(start + rows, int(lengths.size))))
        start += rows
    return out
