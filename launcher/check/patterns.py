"""Warns of reward patterns that demand what prompts end with already, as where a chat template begins the thoughts."""

import re
from collections.abc import Callable, Iterator, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from tandem_config.checks.reward import entry_key
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import FormatReward, RegexReward

_TAG = re.compile(r"</?\w+>")
# What a template may write behind the header of the assistant's turn: tags that are no special tokens.
_END = re.compile(r"(?:\s|</?\w+>)*\Z")
_FEWEST_CHARS = 3


def check_patterns(config: RunConfig, usable: Callable[..., bool], prompts: Sequence[str]) -> Iterator[ConfigProblem]:
    """Warn of each pattern that begins before the completion does.

    Args:
        usable: whether all of the given keys have valid values.
        prompts: the ends of some, as they are tokenized.
    """
    for place, section in enumerate(config.reward):
        key = entry_key(config, place)
        if not usable(key) or not isinstance(section, RegexReward | FormatReward) or not prompts:
            continue
        begun = written_before(section.pattern, prompts)
        if begun:
            without = section.pattern.replace(begun, "", 1)
            yield problem(
                f"{key}.pattern",
                section.pattern,
                f"prompts end with {begun!r} already, so completions begin after it, and the pattern, which "
                "demands it of the completion, can hardly match",
                "leave it out of the pattern" + (f": {without!r}" if without != section.pattern else ""),
                severity="warning",
            )


def written_before(pattern: str, prompts: Sequence[str]) -> str:
    r"""Return what a pattern demands and all prompts end with; "": nothing.

    >>> written_before(r"^<think>.*</think>\s*<answer>", ["<|user|>hi<|assistant|><think>\n"])
    '<think>'
    >>> written_before(r"(<think>)?.*</think>", ["<think>"]), written_before(r"Answer: (\d+)", ["1+1? Answer:"])
    ('', 'Answer:')
    """
    ends = [set(_TAG.findall(_END.search(prompt)[0])) for prompt in prompts]  # type: ignore[index]
    for text in _demanded(parser.parse(pattern)):
        for tag in _TAG.findall(text):
            if all(tag in end for end in ends):
                return str(tag)
        for size in range(len(text), _FEWEST_CHARS - 1, -1):
            begun = text[:size].rstrip()
            is_word = size < len(text) and text[size - 1 : size + 1].isalnum()
            if len(begun.strip()) >= _FEWEST_CHARS and not is_word and all(p.rstrip().endswith(begun) for p in prompts):
                return begun
    return ""


def _demanded(parsed: Any) -> list[str]:
    """Return the texts that every match of a parsed pattern holds."""
    texts = [""]
    for op, argument in parsed:
        if op is ops.LITERAL:
            texts[-1] += chr(argument)
        elif op in (ops.SUBPATTERN, ops.ATOMIC_GROUP):
            inner = _demanded(argument[-1] if op is ops.SUBPATTERN else argument)
            texts[-1] += inner[0]
            texts += inner[1:]
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT) and argument[0] > 0:
            inner = _demanded(argument[2])
            texts[-1] += inner[0]
            texts += [*inner[1:], ""]
        elif op is ops.ASSERT and argument[0] > 0:
            texts = [*_demanded(argument[1]), *texts, ""] if texts == [""] else [*texts, *_demanded(argument[1]), ""]
        elif op is not ops.AT:
            texts.append("")
    return texts
