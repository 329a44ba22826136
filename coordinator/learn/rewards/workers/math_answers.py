r"""Runs in a reward worker: reads reference answers and completions as mathematics. `scorer` and `reader` import sympy.

| a reference                       | what is read                                                       |
|-----------------------------------|--------------------------------------------------------------------|
| `... #### 1,234` (GSM8K)          | what follows the last `####`                                       |
| with `\boxed{..}`, `$..$`, `\(..\)` | the text as it is, as math-verify finds an answer in a completion  |
| anything else (`3\sqrt{13}`)      | `\boxed{3\sqrt{13}}`: a bare text would be searched for a *number* |
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_MARK = "####"
_DELIMITED = re.compile(r"\\boxed|\\fbox|(?<!\\)\$|(?<!\\)\\[(\[]")
_FORMULA = re.compile(r"(?<!\\)\$+[^$]+(?<!\\)\$+")
# 50\,000, 50\ 000 and 50~000 are one number; math-verify takes them for a product.
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;: ]|~)\d{3})+(?!\d)")
_SEPARATOR = re.compile(r"\\[,;: ]|~")
# What may be spelt in letters: arguments of \text and the like, commands, environments.
_LETTERS_APART = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|operatorname|begin|end)\*?\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_WORD = re.compile(r"[^\W\d_]{3,}")
_FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "exp"),
        *("sqrt", "max", "min", "gcd", "lcm", "mod", "det", "inf", "sup", "lim", "abs"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A reference answer as math-verify compares it.

    Attributes:
        gold: values and texts, any of which a completion may equal; empty if nothing could be read.
        problem: why the answer is not read unambiguously as one value; "" if it is.
    """

    gold: list[Any]
    problem: str


def scorer(find: str) -> Callable[[dict[str, Any]], Any]:
    """Make the function that scores a job.

    It returns 1.0 if the completion's answer equals the reference, else 0.0; `{"unreadable": why}` if the reference
    cannot be read.

    Args:
        find: "anywhere": the last expression or number if nothing is marked as the answer; "anchored": only what is.
    """
    from math_verify import verify

    def score(job: dict[str, Any]) -> float | dict[str, str]:
        reference = read_reference(job["answer"])
        if not reference.gold:
            return {"unreadable": reference.problem}
        found = _parse_completion(job["completion"], anchored=find == "anchored")
        return float(verify(reference.gold, found, timeout_seconds=None))

    # Sympy and its parser load more with their first expressions; that must not count against a text's time.
    score({"completion": "$x^2 + 2x + 1$", "answer": "$(x+1)^2$"})
    return score


def reader() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make the function that reads the reference of a job, `{"answer": ...}`.

    It returns `{"problem": ..., "empty": ...}`: see Reference.problem; whether nothing could be read.
    """

    def read(job: dict[str, Any]) -> dict[str, Any]:
        reference = read_reference(job["answer"])
        return {"problem": reference.problem, "empty": not reference.gold}

    read({"answer": r"\frac{1}{2}"})
    return read


# All completions of a prompt have the same reference.
@lru_cache(maxsize=256)
def read_reference(answer: str) -> Reference:
    """Read a reference answer."""
    text = answer.strip()
    if not text:
        return Reference(gold=[], problem="is empty")
    endings = [part.strip() for part in text.split(_MARK)[1:]]
    if endings:
        text = endings[-1]
        if not text:
            return Reference(gold=[], problem=f"ends with {_MARK} and no answer")
        if len(set(endings)) > 1:
            return Reference(
                gold=_parse_bare(text), problem=f"has {len(endings)} answers after {_MARK}; the last counts"
            )
    if not _DELIMITED.search(text):
        gold = _parse_bare(text)
        return Reference(gold=gold, problem=_problem(gold) or _words(text))
    gold = _parse(text)
    return Reference(gold=gold, problem=_problem(gold) or _several(text))


def _parse_bare(text: str) -> list[Any]:
    return _parse(rf"\boxed{{{text}}}")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(_join_digits(text), parsing_timeout=None)
    return parsed


def _parse_completion(text: str, *, anchored: bool) -> list[Any]:
    if not anchored:
        return _parse(text)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if _MARK in text:
        return _parse_bare(text.rpartition(_MARK)[2].strip().partition("\n")[0])
    marked = [
        LatexExtractionConfig(try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    parsed: list[Any] = parse(_join_digits(text), extraction_config=marked, parsing_timeout=None)
    return parsed


def _join_digits(text: str) -> str:
    r"""Write `50\,000` as `50000`.

    >>> _join_digits(r"from 50\,000 to 1~000~000, 3\,14 and 0.5\,000")
    'from 50000 to 1000000, 3\\,14 and 0.5\\,000'
    """
    return _GROUPED.sub(lambda match: _SEPARATOR.sub("", match[0]), text)


def _problem(gold: list[Any]) -> str:
    """Return why what was read is no value; "" if it is one."""
    if not gold:
        return "holds nothing that can be read as mathematics"
    if isinstance(gold[0], str):
        return "cannot be computed with, so a completion has to spell it in the same letters"
    if str(gold[0]) in ("zoo", "nan"):
        return "is read as a number that is not finite"
    return ""


def _words(text: str) -> str:
    r"""Return a complaint about a bare word, which is read as a product of its letters; "" if there is none.

    >>> _words("18 dollars")
    "holds the word 'dollars', which is read as a product of letters: leave it out, or write \\text{dollars}"
    >>> _words(r"5\text{ dollars}") + _words(r"\frac{\pi}{2}") + _words("2 sin x")
    ''
    """
    words = [word for word in _WORD.findall(_LETTERS_APART.sub(" ", text)) if word.lower() not in _FUNCTIONS]
    if not words:
        return ""
    return (
        f"holds the word {words[0]!r}, which is read as a product of letters: leave it out, or write "
        rf"\text{{{words[0]}}}"
    )


def _several(text: str) -> str:
    """Return a complaint if more than one place could be the answer; "" if not."""
    boxes = re.findall(r"\\f?box(?:ed)?\s*\{?((?:[^{}]|\{[^{}]*\})*)", text)
    if len(set(boxes)) > 1:
        return f"has {len(boxes)} boxes with different contents"
    formulas = _FORMULA.findall(text)
    if not boxes and len(formulas) > 1:
        return f"holds {len(formulas)} formulas and no \\boxed{{}} that says which is the answer"
    return ""
