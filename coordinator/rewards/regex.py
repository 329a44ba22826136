"""Reward 1 when a pattern is found in the completion and, if it has a group, group 1 is the answer."""

import re
from collections.abc import Sequence

from coordinator.rewards.base import ScoredText, Scores, score_each


class RegexMatch:
    """1.0 if `pattern` is found and its group 1 (when it has groups) equals the answer, else 0.0.

    The *last* match counts: a completion that reasons before it answers ends with its answer.

    Args:
        pattern: a Python regular expression, searched from left to right.
    Raises: ValueError: the pattern does not compile.
    """

    def __init__(self, *, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"reward.pattern {pattern!r} is not a regular expression: {error}") from error

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """[S] scores of 0.0 or 1.0."""
        return score_each(self._score_one, items)

    def close(self) -> None:
        """Nothing to release."""

    def _score_one(self, item: ScoredText) -> float:
        last = None
        for match in self._pattern.finditer(item.completion):
            last = match
        if last is None:
            return 0.0
        if self._pattern.groups == 0:
            return 1.0
        found = last.group(1)
        return float(found is not None and found.strip() == item.answer.strip())
