"""What a reward is: texts with reference answers in, scores out."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    """[S] scores, and how many of them are 0 for another reason than a wrong completion."""

    values: list[float]
    # Scoring failed.
    num_errors: int = 0
    # The first failure, for the message that ends the run when the budget is spent; quotes no completion.
    first_error: str = ""
    # Scoring took longer than reward.timeout_s.
    num_timeouts: int = 0
    # Items whose *answer* cannot be read, so that no completion could score: item -> why.
    unreadable: dict[int, str] = field(default_factory=dict)


class Reward(Protocol):
    """Scores completions; does not block the event loop for longer than a few milliseconds."""

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores, 1.0 for a right answer; a completion that could not be scored gets 0.0 and is counted."""

    async def close(self) -> None:
        """Release processes; idempotent."""


class StoppedOnly:
    """`reward.require_stop`: 0.0 for completions that were cut off by the length limit, whatever their text.

    Args:
        reward: scores the other completions.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores."""
        whole = [place for place, item in enumerate(items) if not item.truncated]
        scores = await self._reward.score([items[place] for place in whole])
        values = [0.0] * len(items)
        for place, value in zip(whole, scores.values, strict=True):
            values[place] = value
        unreadable = {whole[place]: why for place, why in scores.unreadable.items()}
        return replace(scores, values=values, unreadable=unreadable)

    async def close(self) -> None:
        """Close the reward."""
        await self._reward.close()
