"""Turns texts into jobs for reward workers, and their answers into scores."""

from collections.abc import Sequence

from coordinator.rewards.base import Reward, ScoredText, Scores
from coordinator.workers.pool import RewardWorkers
from coordinator.workers.task import Task
from tandem_config.sections.reward import TextSection

# Share of the texts that may take too long: a policy may well write a few of them.
MAX_LATE_SHARE = 0.25
# In a small batch at least this many: a few slow texts do not mean that the reward is broken.
_FEW = 8
_END = 64


def late_budget(num_texts: int) -> int:
    """Return how many texts of a batch may be late; beyond it the rest is not tried, and the run ends (scoring.py)."""
    return max(_FEW, int(MAX_LATE_SHARE * num_texts))


class WorkedReward(Reward):
    """A reward that compares a completion's text with the answer in worker processes.

    There, because sympy can take seconds or hang on one expression, and a pattern with nested quantifiers exponential
    time, for which `re` blocks the interpreter.

    A job's value is a score, or `{"unreadable": why}` if no completion could match its answer, or `{"found": text}`:
    the score is 0.0, because the completion has this in place of the answer.

    Args:
        task: its name.
        settings: of the task.
    """

    def __init__(self, task: str, section: TextSection, **settings: str) -> None:
        work = Task(name=task, settings=settings, timeout_s=section.timeout_s)
        self._workers = RewardWorkers(work, count=section.workers)

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores of 0.0 or 1.0."""
        # The prompt's end is sent, because it may begin a thought.
        jobs = [{"completion": item.completion, "answer": item.answer, "prompt": item.prompt[-_END:]} for item in items]
        answers = await self._workers.map(jobs, give_up_after=late_budget(len(jobs)))
        said = {place: answer.value for place, answer in enumerate(answers) if isinstance(answer.value, dict)}
        return Scores(
            values=[answer.value if isinstance(answer.value, float) else 0.0 for answer in answers],
            errors={place: answer.error for place, answer in enumerate(answers) if answer.error},
            late=frozenset(place for place, answer in enumerate(answers) if answer.late or not answer.tried),
            unreadable={place: str(value["unreadable"]) for place, value in said.items() if "unreadable" in value},
            found={place: str(value["found"]) for place, value in said.items() if "found" in value},
            seconds={place: answer.seconds for place, answer in enumerate(answers)},
        )

    async def close(self) -> None:
        """End the worker processes, busy ones too."""
        await self._workers.close()
