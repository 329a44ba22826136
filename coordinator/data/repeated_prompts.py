"""Prompts that the data repeat: rows whose prompts, as they are tokenized, are the same text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.data.scan import Scan

# Said of a run whose checkpoint is of a release that did not look at copies.
OLD_ORDER = (
    "data.train repeats prompts, and this run keeps the order of the release that began it, in which copies may share "
    "an iteration; a new run takes the different prompts of an epoch first"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """How often prompts are repeated.

    Attributes:
        num_rows: rows that are used.
        num_different: different prompts among them.
        most: rows of the prompt that has most.
    """

    num_rows: int
    num_different: int
    most: int

    @classmethod
    def of(cls, texts: NDArray[np.uint64]) -> "Repeats":
        """Count equal hashes."""
        _, counts = np.unique(texts, return_counts=True)
        return cls(num_rows=len(texts), num_different=len(counts), most=int(counts.max(initial=0)))

    def __str__(self) -> str:
        """Describe them: `960 rows hold 30 different prompts, one of them 32 times`."""
        if self.num_different == 1:
            return f"{self.num_rows} rows hold the same prompt"
        often = f"each of them {self.most} times" if self.num_rows == self.num_different * self.most else ""
        often = often or f"one of them {self.most} times"
        return f"{self.num_rows} rows hold {self.num_different} different prompts, {often}"


def texts_of(scans: Iterable[Scan]) -> NDArray[np.uint64]:
    """Return the hashes of all used prompts."""
    return np.concatenate([np.zeros(0, np.uint64), *(np.asarray(scan.texts, np.uint64) for scan in scans)])


def copy_warnings(scans: Sequence[Scan], train: Sequence[Scan]) -> Iterator[tuple[str, str]]:
    """Yield a warning, and advice, for a part of the data that repeats prompts, or holds some that are trained on.

    Args:
        train: of data.train, or `scans` itself.
    """
    texts = texts_of(scans)
    copies = Repeats.of(texts)
    if copies.most > 1:
        more = "" if scans is train else "; more completions of each: samples, in evaluation.sets"
        yield str(copies), f"keep one row of each, unless copies are meant{more}"
    both = 0 if scans is train else int(np.isin(texts, texts_of(train)).sum())
    if both:
        warning = f"{both} of {len(texts)} prompts are trained on too, so what is measured on them is memorization"
        yield warning, "leave them out of data.train, or of these"


def different_first(rows: NDArray[np.uint32], prompts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Put all different prompts before second copies, these before third ones, and copies far from each other.

    All rounds have the same order of prompts: of those with one copy, one half is before those with two and the other
    behind them, and so on inwards. So between two copies there is the rest of a round. Between the last copies of an
    epoch and the next epoch's first are the prompts with fewer.

    Args:
        rows: in a random order.
        prompts: by row, the number of its prompt.
    """
    numbers = prompts[rows]
    counts = np.bincount(numbers)
    first = np.zeros(len(counts), np.int64)
    first[numbers[::-1]] = np.arange(len(rows))[::-1]
    by_count = np.lexsort((first, counts))
    place_in_count = np.arange(len(counts)) - np.searchsorted(counts[by_count], counts[by_count])
    half = np.zeros(len(counts), np.int64)
    half[by_count] = place_in_count % 2
    inwards = np.where(half == 0, counts, 2 * counts.max() + 1 - counts)
    grouped = np.argsort(numbers, kind="stable")
    copy = np.zeros(len(rows), np.int64)
    copy[grouped] = np.arange(len(rows)) - np.searchsorted(numbers[grouped], numbers[grouped])
    return rows[np.lexsort((first[numbers], inwards[numbers], copy))]
