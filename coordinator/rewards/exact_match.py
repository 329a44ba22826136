"""Reward 1 when the completion is exactly the answer, or one of those that the row accepts."""

from collections.abc import Sequence

from coordinator.rewards.base import Reward, ScoredText, Scores
from coordinator.workers.answer_extraction import accepted


class ExactMatch(Reward):
    """Reward 1.0 if the decoded completion equals the answer, else 0.0."""

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores of 0.0 or 1.0."""
        return Scores(values=[float(item.completion in accepted(item.answer)) for item in items])
