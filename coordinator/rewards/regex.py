"""Rewards for a pattern in the completion.

Patterns with nested quantifiers can take exponential time, and Python's `re` blocks the interpreter meanwhile: they
run in workers.
"""

from coordinator.rewards.work import WorkedReward
from coordinator.workers.patterns import compiled
from coordinator.workers.task import Task
from coordinator.workers.tasks import FORMAT, REGEX


class RegexMatch(WorkedReward):
    """Reward 1.0 if `pattern` is found and its group 1 (when it has groups) equals the answer, else 0.0.

    The *last* match counts: a completion that reasons before it answers ends with its answer.

    Args:
        pattern: a Python regular expression, searched from left to right.
        num_workers: processes that search.
        timeout_s: CPU seconds that one completion may take; after that it scores 0 and is counted.
    Raises: ValueError: the pattern does not compile.
    """

    def __init__(self, *, pattern: str, num_workers: int = 2, timeout_s: float = 3.0) -> None:
        super().__init__(_task(REGEX, pattern, timeout_s), num_workers=num_workers)


class FormatMatch(WorkedReward):
    """Reward 1.0 if the whole completion matches `pattern`, whose dots match line ends too, else 0.0.

    Args and Raises: as of RegexMatch.
    """

    def __init__(self, *, pattern: str, num_workers: int = 2, timeout_s: float = 3.0) -> None:
        super().__init__(_task(FORMAT, pattern, timeout_s), num_workers=num_workers)


def _task(name: str, pattern: str, timeout_s: float) -> Task:
    try:
        compiled(pattern)
    except ValueError as error:
        raise ValueError(f"reward.pattern {pattern!r} {error}") from error
    return Task(name=name, settings={"pattern": pattern}, timeout_s=timeout_s)
