"""Reward 1 when the completion's mathematical answer equals the reference, by the math-verify library.

Sympy can take seconds or hang on one expression, so it runs in worker processes; math_answers.py describes how a
reference is read.
"""

from collections.abc import Sequence

from coordinator.learn.rewards.base import ScoredText, Scores
from coordinator.learn.rewards.tasks import MATH
from coordinator.learn.rewards.work import score_with
from coordinator.learn.rewards.workers import RewardWorkers


class MathVerify:
    """Reward 1.0 if math-verify finds the completion's answer equal to the reference, else 0.0.

    Args:
        find: reward.find_answer: where to look for a completion's answer.
        num_workers: processes that score.
        timeout_s: CPU seconds that one completion may take; after that it scores 0 and is counted.
    """

    def __init__(self, *, find: str = "anywhere", num_workers: int = 2, timeout_s: float = 3.0) -> None:
        self._workers = RewardWorkers(MATH, {"find": find}, count=num_workers, timeout_s=timeout_s)

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores of 0.0 or 1.0."""
        return await score_with(self._workers, items)

    async def close(self) -> None:
        """End the worker processes, busy ones too."""
        await self._workers.close()
