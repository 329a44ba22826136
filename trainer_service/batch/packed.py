"""A micro-batch: samples one after the other in one row, without padding between them."""

from dataclasses import dataclass, replace

import numpy as np

from trainer_service.batch.samples import IntArray, Samples, span_indices, starts


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One row of T tokens: the sequences of B samples, each without its last token, which predicts nothing.

    It has t completion tokens in the row's order: the logits at `positions[k]` predict token k. Padding is 0s: after a
    sequence, up to a multiple that context parallelism needs, and as one more sequence at the row's end, up to a
    multiple that sequence parallelism needs.
    """

    input_ids: IntArray  # [1, T]
    position_ids: IntArray  # [1, T] each token's place in its sequence
    lengths: IntArray  # [B or B + 1] tokens of each sequence, on all context-parallel ranks together, with its padding
    positions: IntArray  # [t]
    targets: IntArray  # [t] the completion tokens' ids
    token_index: IntArray  # [t] index of the token in the step's [T] arrays
    rows: IntArray  # [B] sample index of each sequence
    counted: bool  # False: a stand-in, so that all ranks run the same collectives; its tokens count nowhere


def inputs(samples: Samples, rows: IntArray, multiple: int = 1) -> IntArray:
    """Return how many tokens each sample takes in a row, [B]: all but its last, rounded up to a multiple."""
    tokens: IntArray = -(-(samples.lengths[rows] - 1) // multiple) * multiple
    return tokens


def pack(
    samples: Samples, rows: IntArray, *, sequence_multiple: int = 1, row_multiple: int = 1, counted: bool = True
) -> Packed:
    """Pack the given samples, in their order.

    Args:
        rows: [B] sample indices, B >= 1.
        sequence_multiple: each sequence is padded to a multiple of this (context parallelism: 2 * CP).
        row_multiple: T is a multiple of this, and this of sequence_multiple (sequence parallelism: TP).
    """
    true = inputs(samples, rows)
    room = inputs(samples, rows, sequence_multiple)
    completions, prompts = samples.completion_lengths[rows], samples.prompt_lengths[rows]
    padding = -int(room.sum()) % row_multiple
    input_ids = np.zeros(int(room.sum()) + padding, np.int64)
    input_ids[span_indices(starts(room), true)] = samples.token_ids[span_indices(samples.token_starts[rows], true)]
    lengths = np.append(room, padding) if padding else room
    return Packed(
        input_ids=input_ids[None],
        position_ids=span_indices(np.zeros_like(lengths), lengths)[None],
        lengths=lengths,
        # the logits at prompt - 1 predict the first completion token
        positions=span_indices(starts(room) + prompts - 1, completions),
        targets=samples.token_ids[span_indices(samples.token_starts[rows] + prompts, completions)],
        token_index=span_indices(samples.completion_starts[rows], completions),
        rows=rows,
        counted=counted,
    )


def context_share(packed: Packed, rank: int, size: int) -> Packed:
    """Take a context-parallel rank's tokens: of each sequence, chunks `rank` and `2 * size - 1 - rank` of 2 * size.

    With causal attention later chunks cost more; an early and a late one together cost the same on every rank. The
    sequences' lengths must be multiples of 2 * size. A rank may get no completion token.
    """
    chunks = packed.lengths // (2 * size)
    first, second = (starts(packed.lengths) + number * chunks for number in (rank, 2 * size - 1 - rank))
    held = span_indices(np.stack([first, second], 1).ravel(), np.repeat(chunks, 2))
    local = np.full(packed.input_ids.size, -1)
    local[held] = np.arange(held.size)
    positions = local[packed.positions]
    mine = positions >= 0
    return replace(
        packed,
        input_ids=packed.input_ids[:, held],
        position_ids=packed.position_ids[:, held],
        positions=positions[mine],
        targets=packed.targets[mine],
        token_index=packed.token_index[mine],
    )
