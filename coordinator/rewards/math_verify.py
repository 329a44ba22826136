"""Reward 1 when the completion's mathematical answer equals the reference, by the math-verify library.

Sympy can take seconds or hang on one expression, so it runs in worker processes; workers/math_answers.py describes how
a reference is read.
"""

from coordinator.rewards.work import WorkedReward
from coordinator.workers.task import Task
from coordinator.workers.tasks import MATH


class MathVerify(WorkedReward):
    """Reward 1.0 if math-verify finds the completion's answer equal to the reference, else 0.0.

    Args:
        find: reward.find_answer: where to look for a completion's answer.
        num_workers: processes that score.
        timeout_s: CPU seconds that one completion may take; after that it scores 0 and is counted.
    """

    def __init__(self, *, find: str = "anywhere", num_workers: int = 2, timeout_s: float = 3.0) -> None:
        super().__init__(Task(name=MATH, settings={"find": find}, timeout_s=timeout_s), num_workers=num_workers)
