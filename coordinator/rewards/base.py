"""What a reward is: texts with reference answers in, scores out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredText:
    """A completion's text with what it is scored against."""

    # Without special tokens.
    completion: str
    answer: str
    # Cut off by the length limit: it has not stopped by itself.
    truncated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """[S] scores, and how many of them are 0 only because scoring failed."""

    values: list[float]
    num_errors: int = 0
    # The first failure, for the message that ends the run when the budget is spent.
    first_error: str = ""


class Reward(Protocol):
    """Scores completions; does not block the event loop for longer than a few milliseconds."""

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """[S] scores, 1.0 for a right answer; a failure to score counts as 0.0 and in `num_errors`."""

    def close(self) -> None:
        """Releases processes; idempotent."""


def score_each(function: Callable[[ScoredText], float], items: Sequence[ScoredText]) -> Scores:
    """Apply a cheap scoring function to every item; an exception scores 0 and is counted."""
    values: list[float] = []
    num_errors, first_error = 0, ""
    for item in items:
        try:
            values.append(function(item))
        except Exception as error:  # the boundary of one item: counted here, budgeted by the caller
            num_errors += 1
            first_error = first_error or f"{type(error).__name__}: {error}"
            values.append(0.0)
    return Scores(values=values, num_errors=num_errors, first_error=first_error)
