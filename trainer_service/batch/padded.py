"""Right-padded token matrices of a micro-batch, with the positions of its completion tokens."""

from dataclasses import dataclass, replace

import numpy as np

from trainer_service.batch.samples import IntArray, Samples, span_indices


@dataclass(frozen=True, kw_only=True)
class Padded:
    """B rows of up to L tokens; the model reads S = L - 1 of them, since the last token predicts nothing.

    It has t completion tokens in row order: token k is predicted by the logits at `positions[k]` of the flattened
    [B * S].
    """

    input_ids: IntArray  # [B, S] padded with 0 on the right
    positions: IntArray  # [t]
    targets: IntArray  # [t] the completion tokens' ids
    token_index: IntArray  # [t] index of the token in the step's [T] arrays
    rows: IntArray  # [B] sample index of each row
    counted: bool  # False: a stand-in, so that all ranks run the same collectives; its tokens count nowhere

    @property
    def padded_tokens(self) -> int:
        """B * S, the tokens of the matrix with padding."""
        return int(self.input_ids.size)


def pad(samples: Samples, rows: IntArray, *, multiple: int = 1, counted: bool = True) -> Padded:
    """Build the matrices of the given samples.

    Args:
        rows: [B] sample indices, B >= 1.
        multiple: S is rounded up to a multiple of this (sequence parallelism needs TP).
    """
    inputs = samples.lengths[rows] - 1
    completions = samples.completion_lengths[rows]
    prompts = samples.prompt_lengths[rows]
    width = -(-int(inputs.max()) // multiple) * multiple
    row_starts = np.arange(rows.size, dtype=np.int64) * width
    input_ids = np.zeros(rows.size * width, np.int64)
    input_ids[span_indices(row_starts, inputs)] = samples.token_ids[span_indices(samples.token_starts[rows], inputs)]
    return Padded(
        input_ids=input_ids.reshape(rows.size, width),
        # the logits at prompt - 1 predict the first completion token
        positions=span_indices(row_starts + prompts - 1, completions),
        targets=samples.token_ids[span_indices(samples.token_starts[rows] + prompts, completions)],
        token_index=span_indices(samples.completion_starts[rows], completions),
        rows=rows,
        counted=counted,
    )


def context_share(padded: Padded, rank: int, size: int) -> Padded:
    """Take the columns of one context-parallel rank: chunks `rank` and `2 * size - 1 - rank` of 2 * size equal ones.

    With causal attention later chunks cost more; an early and a late one together cost the same on every rank. The
    number of columns must be a multiple of 2 * size. A rank may get no completion token.
    """
    rows, columns = padded.input_ids.shape
    chunk = columns // (2 * size)
    chunks = padded.input_ids.reshape(rows, 2 * size, chunk)
    row, column = np.divmod(padded.positions, columns)
    number, within = np.divmod(column, chunk)
    mine = (number == rank) | (number == 2 * size - 1 - rank)
    local = within + np.where(number == rank, 0, chunk)
    return replace(
        padded,
        input_ids=np.ascontiguousarray(chunks[:, [rank, 2 * size - 1 - rank]]).reshape(rows, 2 * chunk),
        positions=(row * 2 * chunk + local)[mine],
        targets=padded.targets[mine],
        token_index=padded.token_index[mine],
    )
