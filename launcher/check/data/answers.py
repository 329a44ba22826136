"""Parses reference answers as `reward.kind: math_verify` will, in worker processes, before a run trains on them."""

import asyncio
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coordinator.workers.answer_extraction import was_read_otherwise
from coordinator.workers.pool import RewardWorkers
from coordinator.workers.task import Answer, Task
from coordinator.workers.tasks import ANSWERS
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import MathVerifyReward
from tandem_files.rows.reading import Row

# Distinct answers that are parsed: at about 3 ms each, half a minute on one core at most.
MAX_READ = 10_000
# Row numbers that a message lists.
_NAMED = 5
# Answers that are kept: about 50 MB.
_MAX_KEPT = 200_000
# File and number of a row.
Place = tuple[Path, int]


@dataclass(kw_only=True)
class AnswerSample:
    """Answers of rows: all, or of many rows every second, fourth, ... one, so that memory is bounded."""

    answers: list[tuple[Place, str]] = field(default_factory=list)
    step: int = 1
    prompt_key: str = "prompt"
    # The first rows whose messages are JSON text.
    _texts: list[Place] = field(default_factory=list)
    _seen: int = 0

    def read_otherwise(self) -> list[Place]:
        """Return rows of which releases before 0.2 read prompt or answer otherwise, of MAX_READ answers at most."""
        firsts = {answer: place for place, answer in reversed(self.answers)}
        changed = [firsts[answer] for answer in list(firsts)[-MAX_READ:] if was_read_otherwise(answer)]
        return sorted({*changed, *self._texts})

    def add(self, batch: Sequence[tuple[Row, Any]]) -> None:
        """Look at rows."""
        for row, _ in batch:
            if self._seen % self.step == 0:
                self.answers.append(((row.file, row.number), row.answer))
            self._seen += 1
            is_text = isinstance(row.prompt, list) and isinstance(row.columns.get(self.prompt_key), str)
            if is_text and row.columns[self.prompt_key].lstrip().startswith("[") and len(self._texts) < _NAMED:
                self._texts.append((row.file, row.number))
            if len(self.answers) > _MAX_KEPT:
                self.answers, self.step = self.answers[::2], 2 * self.step


def check_answers(config: RunConfig, sample: AnswerSample, *, key: str) -> list[ConfigProblem]:
    """Warn about answers that cannot be parsed, or only ambiguously; report an error if none can be.

    Answers are parsed for a reward of kind math_verify only.

    Args:
        key: the part's key in the configuration.
    """
    section = next((reward for reward in config.reward if isinstance(reward, MathVerifyReward)), None)
    if section is None or importlib.util.find_spec("math_verify") is None:
        return []
    by_answer: dict[str, list[Place]] = {}
    for place, answer in sample.answers:
        by_answer.setdefault(answer, []).append(place)
    # Every step-th answer, so that a file sorted by subject is sampled in all its parts.
    step = -(-len(by_answer) // MAX_READ) or 1
    answers = list(by_answer)[::step]
    one_in = step * sample.step
    sampled = "" if one_in == 1 else f" (of {len(answers)} distinct answers that were read, about one in {one_in})"
    read = asyncio.run(_read(section, answers))
    broken = next((answer.error for answer in read if answer.error), "")
    if broken:
        return [problem(key, "", f"the answers could not be read: {broken}")]
    empty, doubtful = _classify(by_answer, answers, read)
    problems = []
    if empty:
        all_empty = len(empty) == sum(len(by_answer[answer]) for answer in answers)
        what = "no completion can earn the reward" + sampled
        severity: Literal["error", "warning"] = "error" if all_empty else "warning"
        problems.append(_named(key, empty, what, "correct data.answer_key or the rows", severity))
    if doubtful:
        what = "it may be read as something else" + sampled
        problems.append(_named(key, doubtful, what, "docs/numerics.md says how answers are read", "warning"))
    return problems


async def _read(section: MathVerifyReward, answers: Sequence[str]) -> list[Answer]:
    workers = RewardWorkers(Task(name=ANSWERS, timeout_s=section.timeout_s), count=section.workers)
    try:
        return await workers.map([{"answer": answer} for answer in answers])
    finally:
        await workers.close()


def _classify(
    by_answer: dict[str, list[Place]], answers: Sequence[str], read: Sequence[Answer]
) -> tuple[list[tuple[Place, str]], list[tuple[Place, str]]]:
    """Return (place, reason) of the rows with an empty answer, and of those with an ambiguous one; ascending."""
    empty: list[tuple[Place, str]] = []
    doubtful: list[tuple[Place, str]] = []
    for text, answer in zip(answers, read, strict=True):
        problem = "takes longer than reward.timeout_s to read" if answer.late else answer.value["problem"]
        if problem:
            is_empty = answer.late or answer.value["empty"]
            (empty if is_empty else doubtful).extend((row, f"{text!r:.60} {problem}") for row in by_answer[text])
    return sorted(empty), sorted(doubtful)


def _named(
    key: str,
    found: Sequence[tuple[Place, str]],
    what: str,
    suggestion: str,
    severity: Literal["error", "warning"],
) -> ConfigProblem:
    (path, number), reason = found[0]
    others = ", ".join(str(row) for (_, row), _ in found[1:_NAMED]) + (", ..." if len(found) > _NAMED else "")
    more = f"; {len(found)} rows in all, also {others}" if len(found) > 1 else ""
    message = f"the answer {reason}: {what}{more}"
    return problem(key, f"{path}:{number}", message, suggestion, severity=severity)
