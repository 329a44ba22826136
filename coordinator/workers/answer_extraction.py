r"""The answer in a text: one function for rewards, references, maj@k, `tandem init` and `tandem check`. Pure.

docs/rewards.md has the table of forms, and a test reads it. A reward says whether a text is right, not whether two
texts agree: maj@k compares answers as texts, so that `0.5` and `\frac12` are two.
"""

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["box", "tag", "hashes", "label", "sentence", "whole"]

_THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]|<\|(begin|end)_of_thought\|>", re.I)
# Full-width forms of ASCII, and of minus and space what keyboards do not have.
_PLAIN = {0xFF01 + place: 0x21 + place for place in range(94)} | {
    0x2212: "-",
    **dict.fromkeys((0xA0, 0x2009, 0x202F, 0x3000), " "),
}
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[\d-]))")
_BOX_ALONE = re.compile(r"-?[\d.,]*\d")
# What may stand between boxes that are one answer: $\boxed{1}$ and $\boxed{2}$.
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:\\[)\]])?\s*(?:,?\s*and|,|;)\s*(?:\\[(\[])?[\s$]*")
_TAG_OPEN, _TAG_CLOSE = (
    rf"(?:<{slash}(?:final[ _-]?)?answer\b[^<>]*>|\[{slash}answer\]|<\|{word}_of_box\|>)"
    for slash, word in (("", "begin"), ("/", "end"))
)
_TAG = re.compile(rf"{_TAG_OPEN}(.*?)(?:{_TAG_CLOSE}|(?={_TAG_OPEN})|\Z)", re.I | re.S)
_HASHES = re.compile(r"(?<!#)####(?!#)")
_HEADING = re.compile(
    r".*:\W*$|(?:step|part|case|solution|explanation|conclusion|summary|check|verif\w*|analysis|note)\b"
    r"|\d+[.)]\s+[^\W\d_]{2}|(?:the |my )?(?:final )?answer\W*$",
    re.I,
)
# No letter before it; words of some languages follow each other without a space.
_BEGIN = r"(?<![^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])"
_MARKS = r"[*_`\"'“”‘’]*"
_ANSWER_WORDS = (
    r"(?:final\s+|correct\s+)?answer|ans|答案|回答|正解|答え|答|antwort|endergebnis|r[ée]ponse(?:\s+finale)?|respuesta(?:\s+final)?"
    r"|resposta(?:\s+final)?|risposta(?:\s+finale)?|ответ|odpowiedź|cevap|정답|답|الجواب|الإجابة|उत्तर|đáp\s+án|jawaban|antwoord|svar"
)
_LABEL = re.compile(
    rf"{_BEGIN}(?:{_ANSWER_WORDS}){_MARKS}(?:\s*[:=→]\s*|\s+[-–—]\s+){_MARKS}|^[#*_ ]*(?:final\s+)?answer[*_ ]*$",
    re.I | re.M,
)
_SENTENCE = re.compile(
    rf"{_BEGIN}(?:answer(?:'s\b|\b[^.\n:;]{{0,60}}?\b(?:is|equals|would\s+be|must\s+be|should\s+be)\b)"
    r"|答案(?:是|为|為)|(?:答え|正解)は|정답은|답은|antwort\s+(?:ist|lautet)|r[ée]ponse(?:\s+finale)?\s+est"
    r"|respuesta(?:\s+final)?\s+es|resposta(?:\s+final)?\s+é|risposta(?:\s+finale)?\s+è|ответ(?:\s*[-–—]|\s+рав[её]н)"
    r"|antwoord\s+is|svaret\s+är|(?:correct|right|best)\s+(?:option|choice)\s+is|故选|应选|选(?=\s*[A-J](?!\w)))"
    rf"(?:\s+(?:therefore|thus|then|hence|simply|just|also|indeed))?\s*{_MARKS}[:=]?\s*{_MARKS}(?!not\b)",
    re.I,
)
# Where the answer of a line ends: a sentence's end, or in JSON the value's.
_END = re.compile(r"[.!?](?=\s|$)|[。！？]|\n")
_FORMULA = r"(?:\$\$?[^$\n]+\$\$?|\\\([^\n]+?\\\)|\\\[.+?\\\])"
_FORMULAS = re.compile(rf"{_FORMULA}(?:\s*(?:,|and|or|, and|, or)\s*{_FORMULA})*", re.S)
_HTML = re.compile(r"</?(?:b|strong|em|i|u|code|span|p|br|mark|div|center|big)\b[^<>]*>", re.I)
_PAIRS = ("__", '""', "''", "“”", "‘’", "«»", "「」", "『』", "【】")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_BRACKETED = re.compile(rf"\(\s*([-+]?(?:{_DIGITS})|[A-Za-z])\s*\)|\[\s*([-+]?(?:{_DIGITS})|[A-Za-z])\s*\]")
# A text that is nothing but its answer: a number, a formula or a letter, with a word and a colon at most.
_WHOLE = re.compile(
    rf"(?:[^\W\d_]+\s*[:=]\s*)?([(\[]?[-+]?[$€£¥]?(?:{_DIGITS})(?:\s*/\s*\d+)?\s*\\?%?[)\]]?|{_FORMULA}|\(?[A-J]\)?)\.?"
)
_SPELT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
TRUTHS = {"true": "true", "yes": "true", "false": "false", "no": "false"}
_EXPONENT = re.compile(r"[-+]?[\d.]+[eE][-+]?\d+")
# A number that Python writes with an exponent: releases before 0.2 did, too.
_SMALL = re.compile(r"-?0\.0{4,}\d+")
_LETTER = re.compile(
    r"(?:option|choice|answer)?\s*[(\[]?([A-J])[)\]]?(?:\s*[.):,\]].*|\s+(?:[-–—]|because|since|as|for|is)\s.*|)",
    re.I | re.S,
)
_LETTER_APART = re.compile(
    r"\(([A-J])\)|(?:\*\*|\b[Oo]ption\s+|\b[Cc]hoice\s+)\(?([A-J])\b"
    r"|(?<![\w\\{$])([A-J])(?:[.)]?(?=\s*$)|\s+is\s+(?:correct|right))",
    re.M,
)
_IN_JSON = re.compile(r"\"((?:[^\"\\]|\\.)*)\"|[^,}\n]*")
# Last verbs of Japanese and Korean sentences.
_COPULA = re.compile(r"\s*(?:です|である|だ|입니다|이다)$")
# Characters behind a mark that are looked at.
_LONGEST = 4096
_SPACE = re.compile(r"\s+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True)
class FoundAnswer:
    """An answer that a text marks as such.

    Attributes:
        text: without quotes, emphasis and brackets around it; never empty.
        kind: what marks it.
        others: different answers of the same kind, which stand before it.
    """

    text: str
    kind: Kind
    others: tuple[str, ...] = ()


def conclusion(text: str) -> str | None:
    """Return what follows the last thought, in plain characters; None: a thought is not closed, so there is no answer.

    >>> conclusion("<think>7?</think> It is ８.")
    ' It is 8.'
    """
    last = _last(_THOUGHT, text)
    if last is None:
        return text.translate(_PLAIN)
    closes = last[1] == "/" or last[2] == "/" or last[3] == "end"
    return text[last.end() :].translate(_PLAIN) if closes else None


def after_prompt(prompt: str, completion: str) -> str:
    """Return a completion with the thought that the end of its prompt begins.

    >>> after_prompt("What is 70 + 3? <think>", "73"), after_prompt("What is 70 + 3?", "73")
    ('<think>73', '73')
    """
    last = _last(_THOUGHT, prompt[-64:].rstrip())
    is_begun = last is not None and last.end() == len(last.string) and conclusion(last[0]) is None
    return last[0] + completion if last is not None and is_begun else completion


def find_answer(text: str) -> FoundAnswer | None:
    r"""Find the answer that a text marks as such; None: it marks none, or its thought is not closed.

    >>> find_answer("<think>72</think><answer> **73** </answer> or 74")
    FoundAnswer(text='73', kind='tag', others=())
    """
    ending = conclusion(text)
    return None if ending is None else _find(ending)


def _find(text: str) -> FoundAnswer | None:
    kinds: tuple[tuple[Kind, Iterator[str]], ...] = (
        ("box", _boxes(text)),
        ("tag", (match[1] for match in _TAG.finditer(text))),
        ("hashes", _after_hashes(text)),
        ("label", _after(_LABEL, text)),
        ("sentence", _after(_SENTENCE, text)),
        ("whole", (match[1] for match in [_WHOLE.fullmatch(unwrapped(text))] if match)),
    )
    for kind, found in kinds:
        answers = [answer for answer in map(unwrapped, found) if answer]
        if answers:
            within = None if kind in ("box", "whole") else _find(answers[-1])
            last = answers[-1] if within is None else within.text
            return FoundAnswer(
                last, kind, tuple(dict.fromkeys(answer for answer in answers[:-1] if answer != answers[-1]))
            )
    return None


def answer_in(text: str) -> str:
    r"""Return the normalised answer of a completion, for maj@k; of a text that marks none, all behind its thoughts.

    >>> answer_in(r"so it is $\boxed{ \frac{1}{2} }$."), answer_in("6 * 7 = 42\n#### 42 "), answer_in("Forty  Two.")
    ('\\frac{1}{2}', '42', 'fortytwo')
    """
    ending = conclusion(text)
    found = None if ending is None else _find(ending)
    answer = found.text if found is not None else text if ending is None else unwrapped(ending)
    bare = _SPACE.sub("", _THOUSANDS.sub("", answer)).casefold().removesuffix(".")
    return bare.strip("$") or bare


def accepted(answer: str) -> list[str]:
    """Return the answers that a row accepts: its list's, which `data.answer_key` has made a JSON list, or its only one.

    >>> accepted('["Paris", "the city of Paris"]'), accepted("Paris"), accepted("[1, 2]")
    (['Paris', 'the city of Paris'], ['Paris'], ['[1, 2]'])
    """
    if not answer.startswith('["'):
        return [answer]
    try:
        listed = json.loads(answer)
    except ValueError:
        return [answer]
    return listed if listed and all(isinstance(one, str) for one in listed) else [answer]


def was_read_otherwise(answer: str) -> bool:
    """Whether an answer of the data meant something else for releases before 0.2.

    >>> [was_read_otherwise(text) for text in ("0.00001", "2.5e6", "(B)", "Answer: 4", "yes", "#### 4", "4", "0.5")]
    [True, True, True, True, True, False, False, False]
    """
    found = find_answer(answer)
    return bool(
        (found is not None and found.kind in ("tag", "label", "sentence"))
        or len(accepted(answer)) > 1
        or letter_of(answer)
        or answer.strip().casefold() in TRUTHS
        or _EXPONENT.fullmatch(answer.strip())
        or (_SMALL.fullmatch(answer.strip()) and "e" in str(float(answer)))
    )


def letter_of(text: str) -> str:
    r"""Return the letter of multiple choice that an answer is, A to J; "" if it is none.

    >>> [letter_of(text) for text in ("B", r"\text{(b)}", "C) Paris", "B. 7", "Because", "x")]
    ['B', 'B', 'C', 'B', '', '']
    """
    match = _LETTER.fullmatch(unwrapped(_SPELT.sub(r"\1", text.translate(_PLAIN)).strip("$ ")))
    return match[1].upper() if match else ""


def last_letter(text: str) -> str:
    """Return the last letter that stands apart in a text, in brackets, in bold or at a line's end; "" if none does."""
    letters = ["".join(filter(None, match.groups())) for match in _LETTER_APART.finditer(text)]
    return letters[-1] if letters else ""


def unwrapped(text: str) -> str:
    """Return a text without the emphasis, quotes, brackets and stops around it.

    >>> [unwrapped(text) for text in ('"**73**".', "<b>73</b>", "( 73 )", "(1, 2)", "`3`, ")]
    ['73', '73', '73', '(1, 2)', '3']
    """
    before = None
    text = _HTML.sub("", text)
    while text != before:
        before = text
        text = text.strip().strip("*`").rstrip(",;:。，；").lstrip(":=>≈").strip()
        if text.endswith(".") and not text.endswith("..."):
            text = text[:-1]
        for pair in _PAIRS:
            begin, end = pair[0], pair[1]
            if len(text) > 2 and text[0] == begin and text[-1] == end and begin not in text[1:-1]:
                text = text[1:-1]
        if match := _BRACKETED.fullmatch(text):
            text = match[1] or match[2]
    return text


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _boxes(text: str) -> Iterator[str]:
    """Yield what boxes hold; those that are one answer, `\\boxed{1} and \\boxed{2}`, as one."""
    joined, end = "", 0
    for match in _BOX.finditer(text):
        begin = match.end()
        if begin < end:  # a box within a box
            continue
        if match[0].endswith("{"):
            content, after = _until_closed(text, begin)
        else:
            alone = _BOX_ALONE.match(text, begin)
            content, after = (alone[0], alone.end()) if alone else ("", begin)
        if joined and content.strip() and _BETWEEN_BOXES.fullmatch(text, end, match.start()):
            joined = f"{joined}, {content.strip()}"
        else:
            yield joined
            joined = content.strip()
        end = after
    yield joined


def _until_closed(text: str, start: int) -> tuple[str, int]:
    """Return the text from `start` to the brace that closes the one before it, and where that ends; all without one."""
    depth = 1
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start:place], place + 1
    return text[start:], len(text)


def _after_hashes(text: str) -> Iterator[str]:
    """Yield what follows ####, but headings of Markdown; below an empty one, or "Answer", the next line."""
    for match in _HASHES.finditer(text):
        line, _, rest = text[match.end() : match.end() + _LONGEST].partition("\n")
        if not _HEADING.match(unwrapped(line) + (":" if line.rstrip(" *_").endswith(":") else "")):
            yield line
        if not line.strip() or re.search(r"answer\W*$", line, re.I):
            yield rest.lstrip().partition("\n")[0]


def _after(mark: re.Pattern[str], text: str) -> Iterator[str]:
    """Yield what follows a mark: a formula, what is quoted, else the sentence's rest; of an empty line the next one."""
    for match in mark.finditer(text):
        rest = text[match.end() : match.end() + _LONGEST].lstrip()
        emphasis = re.search(r"[*_`\"'“]+\s*$", match[0])
        if formulas := _FORMULAS.match(rest):
            yield formulas[0]
        elif re.search(r"[\"']\s*:", match[0]) and (
            value := _IN_JSON.match(text, match.end() - match[0].endswith('"'))
        ):
            yield value[1] or value[0]
        elif emphasis and (closed := re.match(r"(.+?)\s*[*_`\"'”]+", rest.partition("\n")[0])):
            yield closed[1]
        else:
            yield _COPULA.sub("", _END.split(rest, maxsplit=1)[0])
