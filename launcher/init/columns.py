"""Which columns hold prompt, system prompt, tools and answer, and which built-in reward fits the answers."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from coordinator.workers.answer_extraction import accepted, find_answer, letter_of
from launcher.check.data.columns import SYSTEMS
from tandem_config.problems import ConfigErrors, problem
from tandem_config.sections.reward import ExactMatchReward, MathVerifyReward
from tandem_config.sections.rewards.base import RewardSection
from tandem_files.rows.messages import prompt_of, system_of
from tandem_files.rows.values import BadRow, answer_of, tools_of

PROMPTS = ("messages", "conversations", "conversation", "prompt", "question", "problem", "instruction", "query")
ANSWERS = (
    "answer",
    "solution",
    "ground_truth",
    "final_answer",
    "reward_model.ground_truth",
    "reward_model.ground_truth.target",
    "target",
    "label",
)
_NUMBER = re.compile(r"\s*\$?[-+]?\$?[\d.][\d.,/^%:\s]*(?:[eE][-+]?\d+)?\$?\s*")
_LATEX = re.compile(r"\\(?:d?frac|sqrt|pi|cdot|left|text)\b|^\s*\$.*\$\s*$")
# Share of the answers that must have a form; a few odd rows are left to `tandem check`.
_MOST = 0.9
# Longer texts are seldom reproduced letter by letter.
_SHORT_CHARS = 64


def prompt_column(record: Mapping[str, Any], place: str, option: str = "--prompt-key COLUMN") -> str:
    """Find the column of the prompt in a row.

    Args:
        option: how the user names the column, for the message.
    Raises: ConfigErrors: none, or several.
    """
    found, faults = _fitting(record, PROMPTS, prompt_of)
    return _only(found, record, option, f"{place}: {'; '.join(faults) or 'no column has a usual name'}")


def answer_column(
    record: Mapping[str, Any],
    place: str,
    *,
    required: bool,
    option: str = "--answer-key COLUMN",
    reward_option: str = "--reward FILE.py:FUNCTION",
) -> str | None:
    """Find the column of the answer in a row; None: there is none and it is not required.

    Args:
        option: how the user names the column, for the message; `reward_option` a reward of one's own.
    Raises: ConfigErrors: none although required, or several.
    """
    found, faults = _fitting(record, ANSWERS, lambda row, key: answer_of(row, key).strip() or _empty(key))
    if not found and not required:
        return None
    reason = f"{place}: {'; '.join(faults) or 'no column has a usual name'}"
    advice = f", or {reward_option} with a reward that needs no answer" if not found else ""
    return _only(found, record, option, reason, advice)


def templated_column(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Find the column of a row's system prompt (SYSTEMS) or tools (TOOLS), which only a template writes; None: none."""
    read: Callable[[dict[str, Any], str], object] = system_of if names is SYSTEMS else tools_of
    for name in names:
        with suppress(BadRow):
            if read(dict(record), name) is not None:
                return name
    return None


def reward_for(answers: Sequence[str]) -> tuple[RewardSection, str]:
    """Choose a built-in reward by the form of the answers. Returns: it, and why.

    Raises: ConfigErrors: no reward compares such answers.
    """
    texts = [accepted(answer)[0] for answer in answers]
    kinds = [None if found is None or found.kind == "whole" else found.kind for found in map(find_answer, texts)]
    marked = sum(kind is not None for kind in kinds)
    plain = [text for text, kind in zip(texts, kinds, strict=True) if kind is None]
    words = sum(bool(letter_of(text)) or text in ("true", "false") for text in plain)
    formulas = sum(1 for text in plain if _NUMBER.fullmatch(text) or _LATEX.search(text))
    if marked + words + formulas >= _MOST * len(answers):
        what = "have #### or \\boxed{}" if marked > formulas else "are numbers or formulas"
        what = "are letters of multiple choice or truth values" if words > marked + formulas else what
        return MathVerifyReward(kind="math_verify"), f"the answers {what}, so completions are compared as mathematics"
    longest = max(answers, key=len)
    if len(longest) <= _SHORT_CHARS:
        why = (
            "the answers are short texts; a completion must be its answer letter by letter (regex looks within a text)"
        )
        return ExactMatchReward(kind="exact_match"), why
    misfit = problem(
        "--reward",
        "",
        f"no built-in reward compares such answers, texts of up to {len(longest)} characters that are neither "
        f"numbers nor hold #### or \\boxed{{}}, e.g. {longest!r:.60}",
        "give --reward FILE.py:FUNCTION, --set reward.kind=... (docs/rewards.md), or another --answer-key",
    )
    raise ConfigErrors([misfit])


def _fitting(
    record: Mapping[str, Any], names: Sequence[str], read: Callable[[dict[str, Any], str], object]
) -> tuple[list[str], list[str]]:
    """Return the columns that can be read, and what is wrong with others that the row has."""
    found, faults = [], []
    for name in names:
        try:
            read(dict(record), name)
            found.append(name)
        except BadRow as error:
            if not str(error).startswith("has no"):
                faults.append(str(error))
    return found, faults


def _empty(key: str) -> object:
    raise BadRow(f"{key!r} is empty")


def _only(found: Sequence[str], record: Mapping[str, Any], option: str, reason: str, advice: str = "") -> str:
    if len(found) == 1:
        return found[0]
    columns = [
        f"{name}.{inner}" if isinstance(value, Mapping) else name
        for name, value in record.items()
        for inner in (value if isinstance(value, Mapping) else [""])
    ]
    what = f"both {' and '.join(found)} could be it" if found else reason
    message = f"{what}; the columns are {', '.join(columns)}"
    key = option.removesuffix("COLUMN").rstrip(" =")
    raise ConfigErrors([problem(key, "", message, f"give {option}{advice}")])
