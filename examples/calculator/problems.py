"""The calculator task as data: questions with one or two operations, and a demonstrator that uses its tool sloppily.

Questions look like `What is 47 * 38 + 15?`, answers like `1801`. Pure: no torch.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.calculator.tools import calculate

SPLIT_SEED = 0
NUM_TRAIN, NUM_HELDOUT = 4000, 500
OPERANDS = range(10, 100)
ONE_OPERATION = 0.25  # share of such questions; the others have two

# What the demonstrator does. A model that imitates it calls the tool when decoded greedily, but with the first
# operation only: it gets the questions right that have no second one. Sampled, it is right for the others often enough
# that a group of 16 nearly always holds one: what GRPO needs.
ESTIMATE = 0.35  # of the questions: answers from its head, with rounded numbers, and calls no tool
FORGET_LAST = 0.75  # of the calls for two operations: leaves the second one out
SWAP_DIGITS = 0.15  # of the tool's results: swaps the last two digits


@dataclass(frozen=True, kw_only=True)
class Question:
    """Numbers in 10..99 with signs of `+-*` between them."""

    numbers: tuple[int, ...]
    signs: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The question as text."""
        return f"What is {_joined(self.numbers, [f' {sign} ' for sign in self.signs])}?"

    @property
    def expression(self) -> str:
        """What the tool takes."""
        return _joined(self.numbers, self.signs)

    @property
    def answer(self) -> str:
        """The result as text: at most four digits, and a sign."""
        return calculate(self.expression)


def split_questions(seed: int = SPLIT_SEED) -> tuple[list[Question], list[Question]]:
    """Returns (train, held-out) questions, drawn from `seed`; no question is twice in them."""
    rng = random.Random(seed)
    drawn: dict[Question, None] = {}
    while len(drawn) < NUM_TRAIN + NUM_HELDOUT:
        drawn[draw_question(rng)] = None
    return list(drawn)[NUM_HELDOUT:], list(drawn)[:NUM_HELDOUT]


def draw_question(rng: random.Random) -> Question:
    """Draws a question with one or two operations, of which at most one is a product."""
    num = 1 if rng.random() < ONE_OPERATION else 2
    signs = rng.choices("+-*", k=num)
    while signs == ["*", "*"]:
        signs = rng.choices("+-*", k=num)
    return Question(numbers=tuple(rng.choices(OPERANDS, k=num + 1)), signs=tuple(signs))


def write_data(folder: Path) -> None:
    """Writes train.jsonl and heldout.jsonl into `folder`, the same bytes on every machine."""
    train, heldout = split_questions()
    folder.mkdir(parents=True, exist_ok=True)
    for name, questions in (("train", train), ("heldout", heldout)):
        rows = [json.dumps({"prompt": question.prompt, "answer": question.answer}) for question in questions]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def sloppy_messages(question: Question, rng: random.Random) -> list[dict[str, Any]]:
    """Returns a conversation of the sloppy demonstrator: right, from its head, digits swapped, an operation left out.

    >>> question = Question(numbers=(47, 38, 15), signs=("*", "+"))
    >>> [sloppy_messages(question, random.Random(seed))[-1]["content"] for seed in (0, 1, 2, 5)]
    ['1801', '2020', '1810', '1786']
    """
    asked = {"role": "user", "content": question.prompt}
    if rng.random() < ESTIMATE:
        rounded = Question(numbers=tuple(round(number, -1) for number in question.numbers), signs=question.signs)
        return [asked, {"role": "assistant", "content": rounded.answer}]
    kept = 1 if rng.random() < FORGET_LAST else len(question.signs)
    expression = _joined(question.numbers[: kept + 1], question.signs[:kept])
    result = calculate(expression)
    said = result[:-2] + result[:-3:-1] if rng.random() < SWAP_DIGITS else result
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return [
        asked,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "calculate", "content": result},
        {"role": "assistant", "content": said},
    ]


def _joined(numbers: Sequence[int], signs: Sequence[str]) -> str:
    """Writes numbers with a sign after each but the last."""
    return "".join(f"{number}{sign}" for number, sign in zip(numbers, [*signs, ""], strict=True))
