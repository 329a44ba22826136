"""Samples that stay together, since they share one copy of their prompt: for a rank, and for a micro-batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_service.batch.packed import inputs, rounded_up
from trainer_service.batch.samples import IntArray, Samples, by_value, starts


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Samples that go through the model together."""

    members: list[IntArray]  # sample indices of each group
    tokens: IntArray  # of each group in a row


def singles(samples: Samples, rows: IntArray, multiple: int = 1) -> Groups:
    """Make each sample a group. multiple: its tokens are rounded up to this."""
    return Groups(members=np.split(rows, rows.size) if rows.size else [], tokens=inputs(samples, rows, multiple))


def by_prompt(
    samples: Samples, rows: IntArray, max_tokens: int, wanted_tokens: int | None = None, multiple: int = 1
) -> Groups:
    """Group samples of equal prompts; those that do not fit are further groups, each with a copy of the prompt.

    Args:
        max_tokens: of a group, unless it is a single sample.
        wanted_tokens: smaller groups than these are not needed, as far as half of a group's tokens are completions;
            None: as large as max_tokens allows.
        multiple: the tokens of each sequence are rounded up to this.
    """
    wanted = max_tokens if wanted_tokens is None else wanted_tokens
    prompts = by_value(rows, samples.prompt_index[rows])
    members = [part for prompt in prompts for part in _fill(samples, prompt, max_tokens, wanted, multiple)]
    return Groups(members=members, tokens=np.array([row_tokens(samples, part, multiple) for part in members], np.int64))


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
    completions = rounded_up(samples.completion_lengths[rows[several[group]]] - 1, multiple)
    return int(prompts.sum() + completions.sum() + inputs(samples, rows[lead[~several]], multiple).sum())


def repeated(samples: Samples, rows: IntArray) -> IntArray:
    """Return the lengths of the prompts that other samples of a row have already."""
    _, first = np.unique(samples.prompt_index[rows], return_index=True)
    return np.delete(samples.prompt_lengths[rows], first)


def _fill(samples: Samples, members: IntArray, max_tokens: int, wanted_tokens: int, multiple: int) -> list[IntArray]:
    """Cut samples of one prompt into the parts that a micro-batch can hold; completions of like lengths together."""
    prompt = int(rounded_up(samples.prompt_lengths[members[:1]], multiple)[0])
    room = min(max_tokens - prompt, max(wanted_tokens - prompt, prompt))
    lengths = rounded_up(samples.completion_lengths[members] - 1, multiple)
    order = np.argsort(-lengths, kind="stable")
    ends, held = [], 0
    for place, length in enumerate(lengths[order].tolist()):
        if place > 0 and held + length > room:
            ends.append(place)
            held = 0
        held += length
    return np.split(members[order], ends)


def costs(samples: Samples, groups: list[IntArray], even_length: float) -> NDArray[np.float64]:
    """Return what groups of samples cost, each with one copy of its prompt, in tokens.

    A pair of tokens of which one attends to the other costs 2 / even_length, so that a sequence of L tokens alone
    costs L (1 + L / even_length).

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
