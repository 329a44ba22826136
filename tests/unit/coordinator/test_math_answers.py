"""References are read as what they say, not as the first number in them."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.workers.math_answers import read_reference, scorer

Score = Callable[[str, str], Any]

# Bare answers of the kinds that MATH-500 has, by hand: the answer, what equals it in another form, what does not.
# The third column is what a search for a *number* in the bare text finds (`3\sqrt{13}` -> 3), or a near miss.
BARE: list[tuple[str, str, str]] = [
    # numbers
    ("9", "9.0", "90"),
    ("-50", "-50", "50"),
    ("0", "0", "1"),
    ("1234567", "1,234,567", "1234"),
    ("1,234", "1234", "1"),
    ("-1,234.5", "-1234.5", "-1"),
    ("10,\\!080", "10080", "10"),
    ("32,\\!348", "32348", "32"),
    ("100{,}000", "100000", "100"),
    ("50\\,000", "50000", "50"),
    ("1\\,000\\,000", "1000000", "0"),
    ("2~500", "2500", "2"),
    ("0.5", "\\frac{1}{2}", "5"),
    (".5", "0.5", "5"),
    ("7.0", "7", "0"),
    ("10\\%", "0.1", "100"),
    ("70 \\%", "\\frac{7}{10}", "7"),
    ("1.5\\times 10^{6}", "1500000", "10"),
    ("2^{10}", "1024", "2"),
    ("10^{-3}", "0.001", "10"),
    ("\\$32,\\!348", "32348", "348"),
    ("\\$18.90", "18.9", "18"),
    ("5!", "120", "5"),
    # fractions
    ("\\frac{14}{3}", "14/3", "14"),
    ("\\frac 59", "\\frac{5}{9}", "59"),
    ("\\frac12", "0.5", "12"),
    ("\\frac{270}7", "\\frac{270}{7}", "270"),
    ("\\dfrac{1}{2}", "0.5", "1"),
    ("\\tfrac{3}{56}", "\\frac{3}{56}", "3"),
    ("-\\frac{35}{9}", "-\\frac{35}{9}", "\\frac{35}{9}"),
    ("\\frac{-1}{3}", "-\\frac{1}{3}", "\\frac{1}{3}"),
    ("1\\frac{1}{2}", "\\frac{3}{2}", "\\frac{1}{2}"),
    ("2\\frac{3}{4}", "2.75", "\\frac{3}{4}"),
    ("-3/4", "-0.75", "-3"),
    # roots, powers, constants
    ("3\\sqrt{13}", "\\sqrt{117}", "3"),
    ("11\\sqrt2", "11\\sqrt{2}", "11"),
    ("\\sqrt{51}", "\\sqrt{51}", "51"),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}", "3"),
    ("\\sqrt[3]{2}", "2^{1/3}", "2"),
    ("6+9\\sqrt{2}", "9\\sqrt{2}+6", "6"),
    ("12\\pi", "\\pi \\cdot 12", "12"),
    ("\\frac{\\pi}{2}", "\\pi/2", "2"),
    ("\\frac{3\\pi}{4}", "0.75\\pi", "3"),
    ("8\\pi - 16", "-16 + 8\\pi", "8"),
    ("e^2", "e \\cdot e", "2"),
    ("\\log_2 5", "\\log_{2}{5}", "5"),
    ("2 \\ln 3", "\\ln 9", "2"),
    ("\\binom{5}{2}", "10", "5"),
    ("\\cot x", "\\cot x", "x"),
    ("\\sec^2 x", "\\sec^2 x", "2"),
    # tuples and lists
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", "3"),
    ("(6,31,-1)", "(6, 31, -1)", "6"),
    ("(3,-2)", "(3, -2)", "(-2, 3)"),
    ("\\left(\\frac{8}{5}, -\\frac{35}{3}\\right)", "(1.6, -\\frac{35}{3})", "\\frac{8}{5}"),
    ("1,-2", "-2, 1", "1"),
    ("1,-2", "1, -2", "-2"),
    ("3, 5, 7", "7, 5, 3", "7"),
    ("4,6,14,15", "4, 6, 14, 15", "4.6"),
    ("12,15", "15, 12", "12.15"),
    ("\\frac{1}{2},\\frac{3}{4}", "0.75, 0.5", "\\frac{1}{2}"),
    ("\\{1,2,3\\}", "\\{3,2,1\\}", "3"),
    ("\\{ -1, 1\\}", "\\{1, -1\\}", "1"),
    ("1\\text{ and }2", "1, 2", "1"),
    ("3 \\text{ or } 4", "4, 3", "4"),
    ("3 + 2\\sqrt{2}, 3 - 2\\sqrt{2}", "3 \\pm 2\\sqrt{2}", "2"),
    # plus-minus
    ("1 \\pm \\sqrt{19}", "1 + \\sqrt{19}, 1 - \\sqrt{19}", "1"),
    ("\\pm 2", "2, -2", "2"),
    # intervals and sets
    ("[-2,7]", "[-2, 7]", "7"),
    ("(5,\\infty)", "(5, \\infty)", "5"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "(-\\infty,2)\\cup(3,\\infty)", "2"),
    ("(0,9) \\cup (9,36)", "(0, 9) \\cup (9, 36)", "36"),
    ("\\left(\\frac{3}{5},\\frac{8}{3}\\right]", "(0.6, \\frac{8}{3}]", "\\frac{3}{5}"),
    ("[0,1)", "[0, 1)", "[0, 1]"),
    ("x \\in [-2,7]", "[-2, 7]", "-2"),
    ("\\emptyset", "\\emptyset", "0"),
    ("\\mathbb{R}", "\\mathbb{R}", "\\mathbb{Z}"),
    ("\\infty", "\\infty", "-\\infty"),
    # matrices
    (
        "\\begin{pmatrix} -2 \\\\ -14 \\\\ -7 \\end{pmatrix}",
        "\\begin{pmatrix} -2 \\\\ -14 \\\\ -7 \\end{pmatrix}",
        "-7",
    ),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", "4"),
    ("\\begin{pmatrix} 1/3 \\\\ 2/3 \\end{pmatrix}", "\\begin{pmatrix} \\frac13 \\\\ \\frac23 \\end{pmatrix}", "3"),
    # complex numbers
    ("6 - 5i", "-5i + 6", "5"),
    ("2+3i", "3i+2", "2"),
    ("-i", "-i", "i"),
    ("1 - 12i", "1-12i", "12"),
    # units, degrees
    ("90^\\circ", "90", "9"),
    ("36^{\\circ}", "36^\\circ", "3"),
    ("5\\text{ cm}", "5", "cm"),
    ("15\\mbox{ cm}^2", "15", "2"),
    ("864 \\mbox{ inches}^2", "864", "2"),
    ("80 \\text{ mph}", "80", "8"),
    ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}", "270"),
    # expressions and equations
    ("p - q", "-q + p", "q - p"),
    ("2k+2", "2(k+1)", "2"),
    ("3x", "x \\cdot 3", "3"),
    ("2x-3y", "-3y + 2x", "2"),
    ("x^2+2x+1", "(x+1)^2", "2"),
    ("(x+1)(x-2)", "x^2 - x - 2", "2"),
    ("6r^2-4r-24", "6r^2 - 4r - 24", "24"),
    ("3(x^2-x+7)(x^2-x-2)", "3(x^2-x-2)(x^2-x+7)", "3"),
    ("y = 2x + 3", "y = 3 + 2x", "3"),
    ("f(x)=x^2", "x^2", "2"),
    ("x=5", "5", "x"),
    ("z = 3", "3", "z"),
    ("x^2 + y^2 = 4", "x^2+y^2=4", "4"),
    ("a=1, b=2", "b=2, a=1", "2"),
    # inequalities
    ("x > 3", "x > 3", "3"),
    ("2 < x < 5", "2 < x < 5", "5"),
    ("1 \\le x \\le 3", "1 \\leq x \\leq 3", "3"),
    # text
    ("\\text{Evelyn}", "\\text{Evelyn}", "\\text{Briana}"),
    ("\\text{(C)}", "\\text{(C)}", "\\text{(B)}"),
    ("\\text{C}", "C", "B"),
    ("(C)", "C", "D"),
    ("\\text{even}", "\\text{even}", "\\text{odd}"),
    ("\\text{June 20}", "\\text{June 20}", "20"),
    ("\\text{no solution}", "\\text{no solution}", "0"),
    # bases, as math-verify has them: the base is left out on both sides
    ("52_8", "52_8", "42_8"),
    ("4210_{5}", "4210_5", "421_5"),
]

# GSM8K: (the raw answer column, the final number, a number that a search in the raw text finds)
GSM8K: list[tuple[str, str, str]] = [
    ("She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "18", "9"),
    ("It takes 2/2=<<2/2=1>>1 bolt\nSo 2+1=<<2+1=3>>3 bolts\n#### 3", "3", "1"),
    ("The total is 80,000+50,000=$<<80000+50000=130000>>130,000\n#### 70,000", "70000", "130000"),
    ("profit of 200,000-130,000\n#### 1,234", "1234", "1"),
    ("He loses 5.\n#### -5", "-5", "5"),
    ("That is half.\n#### 0.5", "0.5", "5"),
    ("Price: $20 and then $18.50\n#### $18.50", "18.5", "20"),
    ("The answer is 5 before tax and $x=4$ after.\n#### 41", "41", "5"),
    ("1,000 + 200,345 = 201,345\n#### 2,125,000", "2125000", "2"),
    ("100/3 = <<100/3=33.333>>33.333 which rounds to 33\n#### 33", "33", "33.333"),
]


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
        ("the sum is 41", "holds the word 'the'", False),
        ("<think>41, so", "a thought that is not closed", True),
        ("Answer: 3\nAnswer: 4", "has 2 labels; the last counts", False),
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
