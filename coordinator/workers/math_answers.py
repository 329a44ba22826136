r"""Runs in a reward worker: reads reference answers and completions as mathematics. `scorer` and `reader` import sympy.

What a text marks as its answer (answer_extraction.py) is read as `\boxed{..}`; of a text that marks none:

| a text that marks no answer                     | what is read                                              |
|-------------------------------------------------|-----------------------------------------------------------|
| a completion                                    | its last expression or number, as math-verify finds it    |
| a reference with `$..$`, `\(..\)` or `\[..\]`    | likewise                                                  |
| any other reference (`3\sqrt{13}`)              | all of it: a bare text would be searched for a *number*   |
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from coordinator.workers.answer_extraction import (
    TRUTHS,
    FoundAnswer,
    accepted,
    after_prompt,
    conclusion,
    find_answer,
    last_letter,
    letter_of,
)

_DELIMITED = re.compile(r"(?<!\\)\$|(?<!\\)\\[(\[]")
_KINDS = {
    "box": "boxes",
    "tag": "<answer> tags",
    "hashes": "answers after ####",
    "label": "labels",
    "sentence": "answers",
    "whole": "answers",
}
_NUMBER = r"(?<![\w.\\}])(\d[\d,]*(?:\.\d+)?|\.\d+)"
# 2.5e-6 and 2.5 x 10^-6: without a letter behind it, so that 3e^x and 5e2x stay what they are.
_EXPONENT = re.compile(
    _NUMBER
    + r"(?:[eE]([-+]?\d+)(?![\w.]*\w)|\s*(?:[x×*·⋅]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*[{(]?\s*([-+]?\d+)\s*[})]?)"
)
# Further exponents are left as powers of ten: a text of a million digits is no answer.
_MOST_DIGITS = 400
_WORDS_BETWEEN = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]*\}|(?<![\w\\])(and|or)(?!\w)")
# Before a result, where math-verify wants a space; in brackets and quotes only if nothing else is found.
_ATTACHED = re.compile(r"(?<=[>→⇒≈=~])(?=[-+]?[$€£¥]?\d)|(?<=[^\W\d_][:：])(?=[-+]?[$€£¥]?\d)|\\(?=\$\d)")
_ENCLOSED = re.compile(r"(?<=[(\[{\"'“‘`*_:：])(?=[-+]?[$€£¥]?\d)|(?<=[^\W\d_a-zA-Z])(?=[-+]?\d)")
# Below it the six decimals that math-verify compares are no longer three digits.
_TINY = 1e-3
_FORMULA = re.compile(r"(?<!\\)\$+[^$]+(?<!\\)\$+")
# 50\,000, 50\ 000 and 50~000 are one number; math-verify takes them for a product.
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;: ]|~)\d{3})+(?!\d)")
_SEPARATOR = re.compile(r"\\[,;: ]|~")
# What may be spelt in letters: arguments of \text and the like, commands, environments.
_LETTERS_APART = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|operatorname|begin|end)\*?\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_WORD = re.compile(r"[^\W\d_]{3,}")
_SMALL_WORD = re.compile(r"(?<![\\\w])(?:of|it|is|in|to|as|at|by|so)(?!\w)|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
# 73 dollars, since ...
_WITH_UNIT = re.compile(
    r"([-+]?[$€£¥]?[\d.,]*\d(?:\s*/\s*\d+)?)\s*(?=[^\W\d_]{2}|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])"
)
_FUNCTIONS = frozenset(
    (
        "and",
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
        word: the letter of multiple choice, or the truth value, that it is; "": it is compared as mathematics.
    """

    gold: list[Any]
    problem: str
    word: str = ""


def scorer(find: str) -> Callable[[dict[str, Any]], Any]:
    """Make the function that scores a job.

    It returns 1.0 if the completion's answer equals the reference, else 0.0; `{"unreadable": why}` if the reference
    cannot be read.

    Args:
        find: "anywhere": the last expression or number if nothing is marked as the answer; "anchored": only what is.
    """
    from math_verify import verify

    def compare(reference: Reference, completion: str) -> float:
        if reference.word:
            return float(_word_in(completion, reference, anchored=find == "anchored") == reference.word)
        found = _parse_completion(completion, anchored=find == "anchored")
        same = verify(reference.gold, found, timeout_seconds=None)
        return float(same and not _are_tiny_and_apart(reference.gold, found))

    def score(job: dict[str, Any]) -> float | dict[str, str]:
        references = [read_reference(answer) for answer in accepted(job["answer"])]
        readable = [reference for reference in references if reference.gold]
        if not readable:
            return {"unreadable": references[0].problem}
        completion = after_prompt(job.get("prompt", ""), job["completion"])
        return max(compare(reference, completion) for reference in readable)

    # Sympy and its parser load more with their first expressions; that must not count against a text's time.
    score({"completion": "$x^2 + 2x + 1$", "answer": "$(x+1)^2$"})
    return score


def reader() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make the function that reads the reference of a job, `{"answer": ...}`.

    It returns `{"problem": ..., "empty": ...}`: see Reference.problem, of the first accepted answer that has one;
    whether nothing could be read.
    """

    def read(job: dict[str, Any]) -> dict[str, Any]:
        references = [read_reference(answer) for answer in accepted(job["answer"])]
        problem = next((reference.problem for reference in references if reference.problem), "")
        return {"problem": problem, "empty": not any(reference.gold for reference in references)}

    read({"answer": r"\frac{1}{2}"})
    return read


# All completions of a prompt have the same reference.
@lru_cache(maxsize=256)
def read_reference(answer: str) -> Reference:
    """Read a reference answer."""
    if not answer.strip():
        return Reference(gold=[], problem="is empty")
    ending = conclusion(answer)
    if ending is None:
        return Reference(gold=[], problem="is a thought that is not closed")
    found = find_answer(answer)
    text = ending.strip() if found is None else found.text
    if found is None and text.rstrip().endswith("####"):
        return Reference(gold=[], problem="ends with #### and no answer")
    several = "" if found is None else _several_marked(found)
    word = _word_of(text)
    if word:
        return Reference(gold=[text], problem=several, word=word)
    if found is None and _DELIMITED.search(text):
        gold = _parse(text)
        return Reference(gold=gold, problem=_problem(gold) or _several(text))
    gold = _parse_bare(text)
    return Reference(gold=gold, problem=_problem(gold) or several or _words(text))


def _word_of(text: str) -> str:
    """Return the letter of multiple choice, or the truth value, that an answer is; "" if it is neither."""
    plain = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text).strip("$ .").casefold()
    return TRUTHS.get(plain) or letter_of(text)


def _word_in(completion: str, reference: Reference, *, anchored: bool) -> str:
    """Return the letter or truth value that a completion answers with; "" if it does not."""
    found = find_answer(completion)
    if found is not None:
        first = re.match(r"\W*([^\W\d_]+)", found.text)
        return _word_of(found.text) or (TRUTHS.get(first[1].casefold(), "") if first else "")
    ending = conclusion(completion)
    if anchored or ending is None:
        return ""
    if len(reference.word) == 1:
        return last_letter(ending) or letter_of(ending)
    truths = [TRUTHS[word] for word in re.findall(r"[^\W\d_]+", ending.casefold()) if word in TRUTHS]
    return truths[-1] if truths else ""


def _parse_bare(text: str) -> list[Any]:
    return _parse(rf"\boxed{{{_WORDS_BETWEEN.sub(_as_text, text.strip('$') if text.count('$') == 2 else text)}}}")


def _as_text(match: re.Match[str]) -> str:
    return rf"\text{{ {match[1]} }}" if match[1] else match[0]


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(plain_numbers(text), parsing_timeout=None)
    return parsed


def _parse_completion(text: str, *, anchored: bool) -> list[Any]:
    found, ending = find_answer(text), conclusion(text)
    if found is not None:
        return _parse_found(found.text)
    if anchored or ending is None:
        return []
    ending = _ATTACHED.sub(" ", ending)
    return _parse(ending) or _parse(_ENCLOSED.sub(" ", ending))


def _parse_found(text: str) -> list[Any]:
    """Read a marked answer; of one with words the number that it begins with, else what math-verify finds."""
    if not _words(text) and not _SMALL_WORD.search(text):
        return _parse_bare(text)
    begun = _WITH_UNIT.match(text)
    if begun is not None:
        return _parse_bare(begun[1])
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    marked = [
        LatexExtractionConfig(try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    for attached in (_ATTACHED, _ENCLOSED):
        text = plain_numbers(attached.sub(" ", text))
        parsed: list[Any] = parse(f"Answer: {text}", extraction_config=marked, parsing_timeout=None)
        if parsed:
            return parsed
    return _parse_bare(text)


def plain_numbers(text: str) -> str:
    r"""Write numbers without what math-verify misreads: spaces (`50\,000`) and exponents (`2.5e6`, `2.5 x 10^6`).

    >>> plain_numbers(r"1e-05, 2.5E+6, 6.02 \times 10^{23}, 2e, 3e^x, 5e2x, 50\,000")
    '0.00001, 2500000, 602000000000000000000000, 2e, 3e^x, 5e2x, 50000'
    """
    return _EXPONENT.sub(_without_exponent, _join_digits(text))


def _without_exponent(match: re.Match[str]) -> str:
    digits, exponent = match[1].replace(",", ""), int((match[2] or match[3])[:6])
    if abs(exponent) > _MOST_DIGITS:
        return rf"{digits} \times 10^{{{exponent}}}"
    return format(Decimal(f"{digits}e{exponent}"), "f")


def _are_tiny_and_apart(gold: list[Any], found: list[Any]) -> bool:
    """Whether two numbers differ that math-verify takes for equal, because it compares six decimals."""
    numbers = [
        next((value.evalf() for value in values if getattr(value, "is_number", False) and value.is_real), None)
        for values in (gold, found)
    ]
    one, other = numbers
    if one is None or other is None:
        return False
    largest = max(abs(one), abs(other))
    return bool(largest < _TINY and abs(one - other) > largest / 1000)


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


def _several_marked(found: FoundAnswer) -> str:
    """Return a complaint if a text marks several different answers; "" if not."""
    if not found.others:
        return ""
    count, what = len(found.others) + 1, _KINDS[found.kind]
    return f"has {count} {what}{' with different contents' if found.kind == 'box' else '; the last counts'}"


def _several(text: str) -> str:
    """Return a complaint if more than one formula could be the answer; "" if not."""
    formulas = _FORMULA.findall(text)
    if len(formulas) > 1:
        return f"holds {len(formulas)} formulas and no \\boxed{{}} that says which is the answer"
    return ""
