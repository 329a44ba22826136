"""Turns texts into jobs for reward workers, and their answers into scores."""

from collections.abc import Sequence

from coordinator.learn.rewards.base import ScoredText, Scores
from coordinator.learn.rewards.workers import RewardWorkers

# Share of the texts that may take too long: a policy may well write a few of them.
MAX_LATE_SHARE = 0.25
# In a small batch at least this many: a few slow texts do not mean that the reward is broken.
_FEW = 8


def late_budget(num_texts: int) -> int:
    """Return how many texts of a batch may be late; beyond it the rest is not tried, and the run ends (scoring.py)."""
    return max(_FEW, int(MAX_LATE_SHARE * num_texts))


async def score_with(workers: RewardWorkers, items: Sequence[ScoredText]) -> Scores:
    """Score texts in workers.

    A job's value is a score, or `{"unreadable": why}` if no completion could match its answer.
    """
    jobs = [{"completion": item.completion, "answer": item.answer} for item in items]
    answers = await workers.map(jobs, give_up_after=late_budget(len(jobs)))
    unreadable = {
        place: str(answer.value["unreadable"]) for place, answer in enumerate(answers) if isinstance(answer.value, dict)
    }
    return Scores(
        values=[answer.value if isinstance(answer.value, float) else 0.0 for answer in answers],
        num_errors=sum(answer.error != "" for answer in answers),
        first_error=next((answer.error for answer in answers if answer.error), ""),
        num_timeouts=sum(answer.late for answer in answers),
        unreadable=unreadable,
    )
