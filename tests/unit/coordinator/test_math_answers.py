"""References are read as what they say, not as the first number in them."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.learn.rewards.math_answers import read_reference, scorer
from tests.unit.coordinator.math_table import BARE, GSM8K

Score = Callable[[str, str], Any]


def scoring(find: str) -> Score:
    score = scorer(find)
    return lambda completion, answer: score({"completion": completion, "answer": answer})


@pytest.fixture(scope="module")
def anywhere() -> Score:
    return scoring("anywhere")


@pytest.fixture(scope="module")
def anchored() -> Score:
    return scoring("anchored")


def test_the_table_is_large_enough() -> None:
    assert len(BARE) + len(GSM8K) >= 100


@pytest.mark.parametrize(("answer", "equal", "other"), BARE)
def test_a_bare_answer(anywhere: Score, anchored: Score, answer: str, equal: str, other: str) -> None:
    for score in (anywhere, anchored):
        assert score(rf"Thinking of it, the final answer is $\boxed{{{answer}}}$.", answer) == 1.0
        assert score(rf"So we get $\boxed{{{equal}}}$.", answer) == 1.0
        assert score(rf"So we get $\boxed{{{other}}}$.", answer) == 0.0


@pytest.mark.parametrize(("answer", "equal", "other"), BARE[::3])
def test_the_forms_of_an_answer_mean_the_same(anywhere: Score, answer: str, equal: str, other: str) -> None:
    forms = [rf"\boxed{{{answer}}}", rf"First, $y$ is 17. Hence $\boxed{{{answer}}}$."]
    if r"\$" not in answer:
        forms.append(f"${answer}$")
    for form in forms:
        assert anywhere(rf"\boxed{{{equal}}}", form) == 1.0
        assert anywhere(rf"\boxed{{{other}}}", form) == 0.0


@pytest.mark.parametrize(("answer", "final", "other"), GSM8K)
def test_a_row_of_gsm8k(anywhere: Score, anchored: Score, answer: str, final: str, other: str) -> None:
    for reference in (answer, final):
        for score in (anywhere, anchored):
            assert score(f"17 + 4 = 21\n#### {final}", reference) == 1.0
            assert score(rf"It is \boxed{{{final}}}", reference) == 1.0
            assert score(rf"It is \boxed{{{other}}}", reference) == 0.0
        assert anywhere(f"Altogether she makes ${final} every day.", reference) == 1.0


def test_anchored_pays_for_what_is_marked_as_the_answer_only(anywhere: Score, anchored: Score) -> None:
    unfinished = "We have 16 - 3 = 13 eggs, and 13 - 4 = 9"
    assert (anywhere(unfinished, "9"), anchored(unfinished, "9")) == (1.0, 0.0)
    assert anchored("The answer is 9", "9") == anchored(r"hence $\boxed{9}$", "9") == 1.0


@pytest.mark.parametrize(
    ("answer", "problem", "empty"),
    [
        ("", "is empty", True),
        ("   ", "is empty", True),
        ("Some text\n####  ", "ends with #### and no answer", True),
        ("18 dollars", "holds the word 'dollars'", False),
        ("True", "holds the word 'True'", False),
        ("the answer is 41 or 42", "holds the word 'the'", False),
        ("0.\\overline{3}", "cannot be computed with", False),
        ("8 : 00", "is not finite", False),
        ("one #### 3\nand #### 4", "has 2 answers after ####", False),
        (r"$\boxed{3}$ or $\boxed{4}$", "has 2 boxes with different contents", False),
        ("We have $a = 3$ and so $b = 4$.", "holds 2 formulas", False),
        ("no mathematics $here", "nothing that can be read", True),
    ],
)
def test_what_is_not_beyond_doubt_has_a_reason(answer: str, problem: str, empty: bool) -> None:
    reference = read_reference(answer)
    assert problem in reference.problem
    assert (not reference.gold) == empty


@pytest.mark.parametrize("answer", [row[0] for row in [*BARE, *GSM8K]])
def test_what_is_beyond_doubt_has_none(answer: str) -> None:
    assert read_reference(answer).problem == ""
