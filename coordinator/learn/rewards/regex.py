"""Reward 1 when a pattern is found in the completion and, if it has a group, group 1 is the answer."""

from collections.abc import Sequence

from coordinator.learn.rewards.base import ScoredText, Scores
from coordinator.learn.rewards.patterns import compiled
from coordinator.learn.rewards.tasks import REGEX
from coordinator.learn.rewards.work import score_with
from coordinator.learn.rewards.workers import RewardWorkers


class RegexMatch:
    """Reward 1.0 if `pattern` is found and its group 1 (when it has groups) equals the answer, else 0.0.

    The *last* match counts: a completion that reasons before it answers ends with its answer. Patterns with nested
    quantifiers can take exponential time, and Python's `re` blocks the interpreter meanwhile: it runs in workers.

    Args:
        pattern: a Python regular expression, searched from left to right.
        num_workers: processes that search.
        timeout_s: CPU seconds that one completion may take; after that it scores 0 and is counted.
    Raises: ValueError: the pattern does not compile.
    """

    def __init__(self, *, pattern: str, num_workers: int = 2, timeout_s: float = 3.0) -> None:
        try:
            compiled(pattern)
        except ValueError as error:
            raise ValueError(f"reward.pattern {pattern!r} {error}") from error
        self._workers = RewardWorkers(REGEX, {"pattern": pattern}, count=num_workers, timeout_s=timeout_s)

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores of 0.0 or 1.0."""
        return await score_with(self._workers, items)

    async def close(self) -> None:
        """End the worker processes, busy ones too."""
        await self._workers.close()
