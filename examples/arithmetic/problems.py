"""The arithmetic task as data: every sum of two two-digit numbers, and a demonstrator that forgets carries.

Prompts look like `37+58=`, answers like `95`; both are text, one token per character. Pure: no torch.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

SPLIT_SEED = 0
NUM_HELDOUT = 500
OPERANDS = range(10, 100)

# How often the demonstrator forgets a carry. At 0.75 the model that imitates it writes no carries when decoded
# greedily (so it gets the 27 % of sums right that have none), but samples the right answer for the others often
# enough that a group of 16 nearly always holds one: what GRPO needs.
FORGET_CARRY = 0.75


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One sum; both operands are in 10..99."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The question as text, always 6 characters."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The sum as text, 2 or 3 characters."""
        return str(self.left + self.right)


def split_problems(seed: int = SPLIT_SEED) -> tuple[list[Problem], list[Problem]]:
    """Returns all 8100 problems as (train, held-out), in an order drawn from `seed`; the two have none in common."""
    problems = [Problem(left=left, right=right) for left in OPERANDS for right in OPERANDS]
    random.Random(seed).shuffle(problems)
    return problems[NUM_HELDOUT:], problems[:NUM_HELDOUT]


def write_jsonl(problems: list[Problem], path: Path) -> None:
    """Writes one JSON object with `prompt` and `answer` per line."""
    rows = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def write_data(folder: Path) -> None:
    """Writes train.jsonl and heldout.jsonl into `folder`, the same bytes on every machine."""
    train, heldout = split_problems()
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(train, folder / "train.jsonl")
    write_jsonl(heldout, folder / "heldout.jsonl")


def sloppy_answer(problem: Problem, rng: random.Random, forget: float = FORGET_CARRY) -> str:
    """Adds digit by digit and forgets each carry with probability `forget` (0..1).

    >>> sloppy_answer(Problem(left=37, right=58), random.Random(0), forget=1.0)
    '85'
    >>> sloppy_answer(Problem(left=37, right=98), random.Random(0), forget=0.0)
    '135'
    """
    units = problem.left % 10 + problem.right % 10
    tens = problem.left // 10 + problem.right // 10
    if units > 9 and rng.random() >= forget:
        tens += 1
    hundreds = "1" if tens > 9 and rng.random() >= forget else ""
    return f"{hundreds}{tens % 10}{units % 10}"
