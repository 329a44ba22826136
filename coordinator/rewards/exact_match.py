"""Reward 1 when the completion is exactly the answer."""

from collections.abc import Sequence

from coordinator.rewards.base import ScoredText, Scores, score_each


class ExactMatch:
    """1.0 if the decoded completion equals the answer, else 0.0.

    Args:
        require_stop: 0.0 for a completion that was cut off by the length limit, even if the text so far is right.
    """

    def __init__(self, *, require_stop: bool) -> None:
        self._require_stop = require_stop

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """[S] scores of 0.0 or 1.0."""
        return score_each(self._score_one, items)

    def close(self) -> None:
        """Nothing to release."""

    def _score_one(self, item: ScoredText) -> float:
        if self._require_stop and item.truncated:
            return 0.0
        return float(item.completion == item.answer)
