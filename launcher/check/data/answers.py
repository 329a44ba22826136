"""Reads reference answers as `reward.kind: math_verify` will, in workers, before a run trains towards wrong ones."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from coordinator.learn.rewards.tasks import ANSWERS
from coordinator.learn.rewards.workers import Answer, RewardWorkers
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_files.data_rows import Row

# Different answers that are read: at about 3 ms each, half a minute on one core at most.
MAX_READ = 10_000
# Rows that are named.
_NAMED = 5


def check_answers(config: RunConfig, path: Path, rows: Sequence[Row], *, key: str) -> list[ConfigProblem]:
    """Warnings for answers that cannot be read, or not beyond doubt; an error if none can be read.

    Args:
        path: data file that the rows are from; key: its key in the configuration.
    """
    by_answer: dict[str, list[int]] = {}
    for row in rows:
        by_answer.setdefault(row.answer, []).append(row.number)
    # Evenly spread, so that a file sorted by subject is seen in all its parts.
    step = -(-len(by_answer) // MAX_READ) or 1
    answers = list(by_answer)[::step]
    sampled = "" if step == 1 else f" (of {len(answers)} different answers that were read, one in {step})"
    read = asyncio.run(_read(config, answers))
    broken = next((answer.error for answer in read if answer.error), "")
    if broken:
        return [_problem(key, str(path), f"the answers could not be read: {broken}", "")]
    empty, doubtful = _sorted_out(by_answer, answers, read)
    problems = []
    if empty:
        nothing = len(empty) == sum(len(by_answer[answer]) for answer in answers)
        what = "no completion can score there" + sampled
        severity: Literal["error", "warning"] = "error" if nothing else "warning"
        problems.append(_named(key, path, empty, what, "correct data.answer_key or the rows", severity))
    if doubtful:
        what = "it may be read as something else" + sampled
        problems.append(_named(key, path, doubtful, what, "docs/numerics.md says how answers are read", "warning"))
    return problems


async def _read(config: RunConfig, answers: Sequence[str]) -> list[Answer]:
    workers = RewardWorkers(ANSWERS, {}, count=config.reward.workers, timeout_s=config.reward.timeout_s)
    try:
        return await workers.map([{"answer": answer} for answer in answers])
    finally:
        await workers.close()


def _sorted_out(
    by_answer: dict[str, list[int]], answers: Sequence[str], read: Sequence[Answer]
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(row, why) of rows whose answers are nothing, and of those that are doubtful; ascending."""
    empty: list[tuple[int, str]] = []
    doubtful: list[tuple[int, str]] = []
    for text, answer in zip(answers, read, strict=True):
        problem = "takes longer than reward.timeout_s to read" if answer.late else answer.value["problem"]
        if problem:
            nothing = answer.late or answer.value["empty"]
            (empty if nothing else doubtful).extend((row, f"{text!r:.60} {problem}") for row in by_answer[text])
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
