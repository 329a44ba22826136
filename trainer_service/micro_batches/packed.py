"""A micro-batch: samples one after the other in one row, without padding between them."""

from dataclasses import dataclass, replace

import numpy as np

from trainer_service.micro_batches.samples import IntArray, Samples, span_indices, starts


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """One row of T tokens: B samples, each without its last token, which predicts nothing.

    The row is s sequences. One is a whole sample, or a prompt that several samples share, or the completion of one of
    those, which attends to its prompt too. The row has t completion tokens to predict, those that are the policy's: the
    logits at `positions[k]` predict token k; several completions' first tokens are predicted at one position if they
    share a prompt. Padding is 0s: after a sequence, up to a multiple that context parallelism needs; at the row's end
    one more sequence, up to a multiple that sequence parallelism needs.

    A context-parallel rank's row (`context_share`) is chunks of these sequences, which attend to all before them.
    """

    input_ids: IntArray  # [1, T]
    position_ids: IntArray  # [1, T] each token's place in its sample
    lengths: IntArray  # [s] tokens of each sequence, with its padding
    attended: IntArray  # [s] tokens that each sequence attends to, of which its own are the last
    # [sum of attended] where those of each sequence are, in the rows of all context-parallel ranks, one after the
    # other; None: every sequence attends to its own tokens only
    keys: IntArray | None
    positions: IntArray  # [t]
    targets: IntArray  # [t] the tokens' ids
    token_index: IntArray  # [t] index of the token in the step's [T] arrays
    rows: IntArray  # [B] index of each sample
    counted: bool  # False: a stand-in, so that all ranks run the same collectives; its tokens count nowhere


@dataclass(frozen=True, kw_only=True)
class _Sequences:
    """The sequences of a row, and where the predictions of each sample are: of its first token, and of the others."""

    sources: IntArray  # [s] index of the first token in the step's token ids
    lengths: IntArray  # [s] without padding
    prefixes: IntArray  # [s] the sequence that is its prefix; -1: none
    first: IntArray  # [B] the sequence of the sample's prompt, alone or with the completion
    own: IntArray  # [B] the sequence of the completion's tokens; if they are one, which no sequence has, as `first`


def rounded_up(lengths: IntArray, multiple: int) -> IntArray:
    """Round lengths of sequences up to a multiple.

    >>> rounded_up(np.array([0, 3, 4]), 4).tolist()
    [0, 4, 4]
    """
    rounded: IntArray = -(-lengths // multiple) * multiple
    return rounded


def inputs(samples: Samples, rows: IntArray, multiple: int = 1) -> IntArray:
    """Return how many tokens each sample takes in a row, [B]: all but its last, rounded up to a multiple."""
    return rounded_up(samples.lengths[rows] - 1, multiple)


def pack(
    samples: Samples,
    rows: IntArray,
    *,
    share_prompts: bool = False,
    sequence_multiple: int = 1,
    row_multiple: int = 1,
    counted: bool = True,
) -> PackedRow:
    """Pack the given samples, in their order.

    Args:
        rows: [B] sample indices, B >= 1.
        share_prompts: samples of equal prompts share one copy of it, which precedes all completions in the row.
        sequence_multiple: each sequence is padded to a multiple of this (context parallelism: 2 * CP).
        row_multiple: T is a multiple of this, and this of sequence_multiple (sequence parallelism: TP).
    """
    found = _shared(samples, rows) if share_prompts else _whole(samples, rows)
    room = rounded_up(found.lengths, sequence_multiple)
    begin, padding = starts(room), -int(room.sum()) % row_multiple
    input_ids = np.zeros(int(room.sum()) + padding, np.int64)
    input_ids[span_indices(begin, found.lengths)] = samples.token_ids[span_indices(found.sources, found.lengths)]
    lengths = np.append(room, [padding] if padding else []).astype(np.int64)
    has_prefix, prefixes = found.prefixes >= 0, np.zeros_like(lengths)
    prefixes[: room.size] = np.where(has_prefix, found.lengths[found.prefixes], 0)
    completions, prompts = samples.completion_lengths[rows], samples.prompt_lengths[rows]
    apart = has_prefix[found.own]  # the completion is a sequence of its own
    positions = span_indices(begin[found.own] + np.where(apart, 0, prompts) - 1, completions)
    # the logits of the prompt's last token predict the first completion token
    positions[starts(completions)] = begin[found.first] + prompts - 1
    token_index = span_indices(samples.completion_starts[rows], completions)
    of_policy = samples.loss_mask[token_index] if samples.loss_mask.size else slice(None)
    return PackedRow(
        input_ids=input_ids[None],
        position_ids=span_indices(prefixes, lengths)[None],
        lengths=lengths,
        attended=prefixes + lengths,
        keys=_keys(begin[found.prefixes], prefixes, lengths) if has_prefix.any() else None,
        positions=positions[of_policy],
        targets=samples.token_ids[span_indices(samples.token_starts[rows] + prompts, completions)][of_policy],
        token_index=token_index[of_policy],
        rows=rows,
        counted=counted,
    )


def _keys(prefix_begin: IntArray, prefixes: IntArray, lengths: IntArray) -> IntArray:
    """Return the places of each sequence's prefix and of its own tokens, sequence after sequence.

    Args:
        prefix_begin: [s] of sequences without a prefix: anything; padding at the row's end may be left out.
    """
    first = np.stack([np.zeros_like(lengths), starts(lengths)], 1)
    first[: prefix_begin.size, 0] = prefix_begin
    return span_indices(first.ravel(), np.stack([prefixes, lengths], 1).ravel())


def _whole(samples: Samples, rows: IntArray) -> _Sequences:
    """Make each sample a sequence."""
    numbers = np.arange(rows.size)
    return _Sequences(
        sources=samples.token_starts[rows],
        lengths=inputs(samples, rows),
        prefixes=np.full(rows.size, -1),
        first=numbers,
        own=numbers,
    )


def _shared(samples: Samples, rows: IntArray) -> _Sequences:
    """Make sequences of prompts that several samples share and of samples that share none, then of completions.

    Among each of the two, equal lengths follow one another: attention computes those together.
    """
    prompts, completions = samples.prompt_lengths[rows], samples.completion_lengths[rows]
    _, lead, group, counts = np.unique(
        samples.prompt_index[rows], return_index=True, return_inverse=True, return_counts=True
    )
    several = counts > 1
    lengths = np.where(several, prompts[lead], inputs(samples, rows[lead]))
    order = np.argsort(-lengths, kind="stable")
    first = np.argsort(order)[group]
    apart = np.flatnonzero(several[group] & (completions > 1))
    apart = apart[np.lexsort((-completions[apart], -prompts[apart]))]
    own = first.copy()
    own[apart] = order.size + np.arange(apart.size)
    begin = samples.token_starts[rows]
    return _Sequences(
        sources=np.concatenate([begin[lead][order], begin[apart] + prompts[apart]]),
        lengths=np.concatenate([lengths[order], completions[apart] - 1]),
        prefixes=np.concatenate([np.full(order.size, -1), first[apart]]),
        first=first,
        own=own,
    )


def context_share(packed: PackedRow, rank: int, size: int) -> PackedRow:
    """Take a context-parallel rank's tokens: of each sequence, chunks `rank` and `2 * size - 1 - rank` of 2 * size.

    A chunk attends to itself, to the chunks before it and to the prompt that its sequence shares. Later chunks cost
    more; an early and a late one together cost the same on every rank, whatever precedes the sequence. The row is all
    sequences' early chunks, then all late ones: equal ones follow one another. A rank may get no completion token.

    Args:
        packed: a whole row, whose sequences' lengths are multiples of 2 * size.
    """
    chunks, numbers = packed.lengths // (2 * size), np.array([rank, 2 * size - 1 - rank])
    held = _held(packed.lengths, rank, size)
    local = np.full(packed.input_ids.size, -1)
    local[held] = np.arange(held.size)
    positions = local[packed.positions]
    mine = positions >= 0
    ends = ((numbers[:, None] + 1) * chunks).ravel()  # of each chunk in its sequence
    attended = np.tile(packed.attended - packed.lengths, 2) + ends
    all_keys = np.arange(packed.input_ids.size) if packed.keys is None else packed.keys
    places = np.argsort(np.concatenate([_held(packed.lengths, other, size) for other in range(size)]))
    return replace(
        packed,
        input_ids=packed.input_ids[:, held],
        position_ids=packed.position_ids[:, held],
        lengths=np.tile(chunks, 2),
        attended=attended,
        keys=places[all_keys[span_indices(np.tile(starts(packed.attended), 2), attended)]],
        positions=positions[mine],
        targets=packed.targets[mine],
        token_index=packed.token_index[mine],
    )


def _held(lengths: IntArray, rank: int, size: int) -> IntArray:
    """Return which tokens of a row a context-parallel rank has, in its order."""
    chunks, begin = lengths // (2 * size), starts(lengths)
    first = np.concatenate([begin + number * chunks for number in (rank, 2 * size - 1 - rank)])
    return span_indices(first, np.tile(chunks, 2))
