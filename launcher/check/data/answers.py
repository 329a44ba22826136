"""Parses reference answers as `reward.kind: math_verify` will, in worker processes, before a run trains on them."""

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from coordinator.learn.rewards.workers.pool import RewardWorkers
from coordinator.learn.rewards.workers.task import Answer, Task
from coordinator.learn.rewards.workers.tasks import ANSWERS
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import MathVerifyReward
from tandem_files.data_rows import Row

# Distinct answers that are parsed: at about 3 ms each, half a minute on one core at most.
MAX_READ = 10_000
# Row numbers that a message lists.
_NAMED = 5


def check_answers(config: RunConfig, path: Path, rows: Sequence[Row], *, key: str) -> list[ConfigProblem]:
    """Warn about answers that cannot be parsed, or only ambiguously; report an error if none can be.

    Answers are parsed for a reward of kind math_verify only.

    Args:
        path: data file that the rows are from.
        key: the file's key in the configuration.
    """
    section = next((reward for reward in config.reward if isinstance(reward, MathVerifyReward)), None)
    if section is None or importlib.util.find_spec("math_verify") is None:
        return []
    by_answer: dict[str, list[int]] = {}
    for row in rows:
        by_answer.setdefault(row.answer, []).append(row.number)
    # Every step-th answer, so that a file sorted by subject is sampled in all its parts.
    step = -(-len(by_answer) // MAX_READ) or 1
    answers = list(by_answer)[::step]
    sampled = "" if step == 1 else f" (of {len(answers)} distinct answers that were read, one in {step})"
    read = asyncio.run(_read(section, answers))
    broken = next((answer.error for answer in read if answer.error), "")
    if broken:
        return [_problem(key, str(path), f"the answers could not be read: {broken}", "")]
    empty, doubtful = _classify(by_answer, answers, read)
    problems = []
    if empty:
        all_empty = len(empty) == sum(len(by_answer[answer]) for answer in answers)
        what = "no completion can earn the reward" + sampled
        severity: Literal["error", "warning"] = "error" if all_empty else "warning"
        problems.append(_named(key, path, empty, what, "correct data.answer_key or the rows", severity))
    if doubtful:
        what = "it may be read as something else" + sampled
        problems.append(_named(key, path, doubtful, what, "docs/numerics.md says how answers are read", "warning"))
    return problems


async def _read(section: MathVerifyReward, answers: Sequence[str]) -> list[Answer]:
    workers = RewardWorkers(Task(name=ANSWERS, timeout_s=section.timeout_s), count=section.workers)
    try:
        return await workers.map([{"answer": answer} for answer in answers])
    finally:
        await workers.close()


def _classify(
    by_answer: dict[str, list[int]], answers: Sequence[str], read: Sequence[Answer]
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return (row number, reason) of the rows with an empty answer, and of those with an ambiguous one; ascending."""
    empty: list[tuple[int, str]] = []
    doubtful: list[tuple[int, str]] = []
    for text, answer in zip(answers, read, strict=True):
        problem = "takes longer than reward.timeout_s to read" if answer.late else answer.value["problem"]
        if problem:
            is_empty = answer.late or answer.value["empty"]
            (empty if is_empty else doubtful).extend((row, f"{text!r:.60} {problem}") for row in by_answer[text])
    return sorted(empty), sorted(doubtful)


def _named(
    key: str,
    path: Path,
    found: Sequence[tuple[int, str]],
    what: str,
    suggestion: str,
    severity: Literal["error", "warning"],
) -> ConfigProblem:
    others = ", ".join(str(row) for row, _ in found[1:_NAMED]) + (", ..." if len(found) > _NAMED else "")
    more = f"; {len(found)} rows in all, also {others}" if len(found) > 1 else ""
    message = f"the answer {found[0][1]}: {what}{more}"
    return _problem(key, f"{path}:{found[0][0]}", message, suggestion, severity)


def _problem(
    key: str, value: str, message: str, suggestion: str, severity: Literal["error", "warning"] = "error"
) -> ConfigProblem:
    return ConfigProblem(key=key, value=value, message=message, suggestion=suggestion, severity=severity)
