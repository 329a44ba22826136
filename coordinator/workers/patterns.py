"""Runs in a reward worker: patterns in completions. `re` can take exponential time."""

import re
from collections.abc import Callable
from typing import Any

from coordinator.workers.answer_extraction import accepted

# Most characters of a wrong answer in messages.
_SHOWN_CHARS = 200


def compiled(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Compile the pattern. Raises: ValueError: it is not a regular expression that Python can use."""
    try:
        return re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression: {error}") from error


def form_scorer(pattern: str) -> Callable[[dict[str, Any]], float]:
    """Make the function that scores a job: 1.0 if the whole completion matches; a dot also matches line ends."""
    wanted = compiled(pattern, re.DOTALL)
    return lambda job: float(wanted.fullmatch(job["completion"]) is not None)


def scorer(pattern: str) -> Callable[[dict[str, Any]], float | dict[str, str]]:
    """Make the function that scores a job.

    It returns 1.0 if the pattern is found and its group 1 (when it has groups) is the answer; the *last* match counts.
    `{"found": ...}`: group 1 is something else.
    """
    wanted = compiled(pattern)

    def score(job: dict[str, Any]) -> float | dict[str, str]:
        last = None
        for match in wanted.finditer(job["completion"]):
            last = match
        if last is None:
            return 0.0
        if wanted.groups == 0:
            return 1.0
        found = (last.group(1) or "").strip()
        right = last.group(1) is not None and found in map(str.strip, accepted(job["answer"]))
        return 1.0 if right else {"found": found[:_SHOWN_CHARS]}

    return score
