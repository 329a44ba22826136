"""Samples that stay together, because they share one copy of their prompt: for a rank, and for a micro-batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_service.micro_batches.packed import inputs, rounded_up
from trainer_service.micro_batches.samples import IntArray, Samples, span_indices, starts


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Samples that go through the model together."""

    rows: IntArray  # sample indices, group after group
    sizes: IntArray  # samples of each group
    tokens: IntArray  # of each group in a row

    def take(self, groups: IntArray) -> IntArray:
        """Return the sample indices of some groups, group after group."""
        return self.rows[span_indices(starts(self.sizes)[groups], self.sizes[groups])]


def singles(samples: Samples, rows: IntArray, multiple: int = 1) -> Groups:
    """Make each sample a group. multiple: its tokens are rounded up to this."""
    return Groups(rows=rows, sizes=np.ones_like(rows), tokens=inputs(samples, rows, multiple))


def by_prompt(
    samples: Samples, rows: IntArray, max_tokens: int, wanted_tokens: int | None = None, multiple: int = 1
) -> Groups:
    """Group samples of equal prompts; those that do not fit are further groups, each with a copy of the prompt.

    Completions of a group are by falling length, so that those of like lengths are together.

    Args:
        max_tokens: of a group, unless it is a single sample.
        wanted_tokens: smaller groups than these are not needed, as far as half of a group's tokens are completions;
            None: as large as max_tokens allows.
        multiple: the tokens of each sequence are rounded up to this.
    """
    wanted = max_tokens if wanted_tokens is None else wanted_tokens
    rows = rows[np.lexsort((-_completions(samples, rows, multiple), samples.prompt_index[rows]))]
    prompts, completions = rounded_up(samples.prompt_lengths[rows], multiple), _completions(samples, rows, multiple)
    first = np.flatnonzero(np.diff(samples.prompt_index[rows], prepend=-1))
    room = np.minimum(max_tokens - prompts[first], np.maximum(wanted - prompts[first], prompts[first]))
    too_many = np.add.reduceat(completions, first) > room if first.size else first
    bounds = np.append(first, rows.size)
    further = [bounds[n] + _ends(completions[bounds[n] : bounds[n + 1]], room[n]) for n in np.flatnonzero(too_many)]
    first = np.sort(np.concatenate([first, *further]))
    sizes = np.diff(first, append=rows.size)
    shared = prompts[first] + np.add.reduceat(completions, first) if first.size else first
    tokens = np.where(sizes > 1, shared, inputs(samples, rows[first], multiple))
    return Groups(rows=rows, sizes=sizes, tokens=tokens)


def _completions(samples: Samples, rows: IntArray, multiple: int) -> IntArray:
    """Return the tokens of each completion behind a prompt, [B]: without the last one, rounded up."""
    return rounded_up(samples.completion_lengths[rows] - 1, multiple)


def _ends(lengths: IntArray, room: int) -> IntArray:
    """Cut completions of one prompt into parts that a micro-batch can hold. Returns: where all but the first begin."""
    ends, held = [], 0
    for place, length in enumerate(lengths.tolist()):
        if place > 0 and held + length > room:
            ends.append(place)
            held = 0
        held += length
    return np.array(ends, np.int64)


def row_tokens(samples: Samples, rows: IntArray, multiple: int = 1) -> int:
    """Count the tokens of a row that shares prompts: each of them once, and completions without their last token.

    Args:
        multiple: the tokens of each sequence are rounded up to this: of a shared prompt, of each of its completions,
            of a sample that shares its prompt with no other.
    """
    _, lead, group, counts = np.unique(
        samples.prompt_index[rows], return_index=True, return_inverse=True, return_counts=True
    )
    several = counts > 1
    prompts = rounded_up(samples.prompt_lengths[rows[lead[several]]], multiple)
    completions = _completions(samples, rows[several[group]], multiple)
    return int(prompts.sum() + completions.sum() + inputs(samples, rows[lead[~several]], multiple).sum())


def repeated(samples: Samples, rows: IntArray) -> IntArray:
    """Return the lengths of the prompts that other samples of a row have already."""
    _, first = np.unique(samples.prompt_index[rows], return_index=True)
    return np.delete(samples.prompt_lengths[rows], first)


def costs(samples: Samples, groups: list[IntArray], even_length: float) -> NDArray[np.float64]:
    """Return what groups of samples cost, each with one copy of its prompt, in tokens.

    A pair of tokens of which one attends to the other costs 2 / even_length. A sequence of L tokens so costs L (1 + L /
    even_length).

    Args:
        even_length: see `deal`.
    """
    members, sizes = np.concatenate(groups), np.array([group.size for group in groups])
    prompts, completions = samples.prompt_lengths[members], samples.completion_lengths[members]
    own = completions * (1 + (2 * prompts + completions) / even_length)
    first = starts(sizes)
    of_prompt = prompts[first] * (1 + prompts[first] / even_length)
    total: NDArray[np.float64] = of_prompt + np.add.reduceat(own, first)
    return total


def divided(groups: list[IntArray], parts: int) -> list[IntArray]:
    """Divide each group into up to `parts` parts of about equally many samples."""
    return [group[start::parts] for group in groups for start in range(min(parts, group.size))]
