"""Scores completions of one's own with a configuration's rewards.

The run's own rewards, workers and limits; no service, GPU or weights. Failures are shown, and what would end a run.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coordinator.learn.scoring import Scorer, added, failures_of, over_budget, remarks_of
from coordinator.rewards.base import ScoredText, Scores
from coordinator.rewards.registry import Part, build_rewards, close_rewards, start_with_columns
from coordinator.workers.answer_extraction import after_prompt, conclusion, find_answer
from launcher.score.rows import COMPLETION, CompletionReader, Item
from servicekit.errors import ConfigError
from tandem_config.loading import load_config
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import (
    EnvironmentReward,
    ExactMatchReward,
    FormatReward,
    LengthReward,
    MathVerifyReward,
    OverlongReward,
    RegexReward,
)
from tandem_config.sections.rewards.base import FailureSection, RewardSection, StopSection

_SHOWN_CHARS = 80


@dataclass(frozen=True, kw_only=True)
class ScoredCompletion:
    """A completion with its scores.

    Attributes:
        place: its row, and which of the row's completions it is: `out.jsonl:3#0`.
        reward: the weighted sum; None: the completion would be left out.
        scores: unweighted, by the reward's name; None: it does not apply.
        parts: of the scores, by name.
        why: why a reward gave no score, or 0, by its name.
        transcript: of the episode whose last turn it is, as stored (JSON); "": of none.
        seconds: of its scoring, by the reward's name; of the whole call where several were scored together.
    """

    place: str
    prompt: str
    completion: str
    answer: str
    reward: float | None
    scores: Mapping[str, float | None]
    parts: Mapping[str, float]
    why: Mapping[str, str]
    seconds: Mapping[str, float]
    transcript: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What scoring has shown.

    Attributes:
        weights: of the rewards, by name.
        remarks: what is odd about the file or the scores, each once.
        would_end: why a run ends that sees such a batch; "": it does not.
    """

    completions: Sequence[ScoredCompletion]
    weights: Mapping[str, float]
    remarks: Sequence[str] = ()
    would_end: str = ""

    @property
    def totals(self) -> dict[str, Any]:
        """Counts, and means over the completions that have a value."""
        rewards = [one.reward for one in self.completions if one.reward is not None]
        parts = dict.fromkeys(name for one in self.completions for name in one.parts)
        values = {name: [one.scores[name] for one in self.completions] for name in self.weights}
        values |= {name: [one.parts.get(name) for one in self.completions] for name in parts}
        return {
            "completions": len(self.completions),
            "left_out": len(self.completions) - len(rewards),
            "reward_mean": _mean(rewards),
            "means": {name: _mean([value for value in of_all if value is not None]) for name, of_all in values.items()},
        }

    def plain(self) -> dict[str, Any]:
        """Make a JSON object."""
        return {
            "totals": self.totals,
            "weights": dict(self.weights),
            "remarks": list(self.remarks),
            "would_end": self.would_end,
            "completions": [asdict(one) for one in self.completions],
        }


def score(
    config: RunConfig | Path | str,
    completions: Path | str | Sequence[Mapping[str, Any]],
    *,
    overrides: Sequence[str] = (),
    column: str = COMPLETION,
) -> Report:
    """Score completions as a run would; may be called in a notebook, whose event loop runs.

    Args:
        config: a configuration, or its file.
        completions: a JSONL or Parquet file, or rows: a completion with the data's own columns (prompt, answer, ...).
        overrides: `section.key=value`, as `--set` has them.
        column: which holds the completion: a text, messages whose last is the completion, or a list of completions.
    Raises: ConfigErrors; ConfigError: a reward cannot be started; DataError: rows cannot be used, by file and row.
    """
    loaded = config if isinstance(config, RunConfig) else load_config(Path(config), overrides)
    reader = CompletionReader(loaded, column)
    items = reader.of_file(Path(completions)) if isinstance(completions, str | Path) else reader.of_rows(completions)
    # A loop of its own, in a thread: that of a notebook is running.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _scored(loaded, items, reader)).result()


async def _scored(config: RunConfig, items: Sequence[Item], reader: CompletionReader) -> Report:
    """Start the rewards, score, and close them. Raises: ConfigError: one cannot be started."""
    patient = [
        section.model_copy(update={"on_error": "zero", "max_error_share": 1.0})
        if isinstance(section, FailureSection)
        else section
        for section in config.reward
    ]
    if any(isinstance(section, EnvironmentReward) for section in config.reward):
        why = "is what episodes got, which a file of completions does not say: tandem evaluate runs them"
        raise ConfigError(f"reward.kind environment {why}")
    parts, limits = build_rewards(config.model_copy(update={"reward": tuple(patient)})), build_rewards(config)
    texts = [item.text for item in items]
    try:
        await start_with_columns(parts, list(reader.columns))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        found = await Scorer(parts=parts, codec=reader.codec).score_items(texts)
    finally:
        await close_rewards(parts)
    # All were tried; what a run makes of it is the configuration's.
    judged = [(limit, scores) for limit, (_, scores) in zip(limits, found, strict=True)]
    rewards_S, missing_S = added(judged)
    failures = failures_of(judged)
    return Report(
        completions=[
            _completion(config, judged, item, place, None if missing_S[place] else float(rewards_S[place]), failures)
            for place, item in enumerate(items)
        ],
        weights={part.name: part.weight for part in limits},
        remarks=list(dict.fromkeys([*reader.remarks, *remarks_of(found, len(items)).values()])),
        would_end=next((why for part, scores in judged if (why := over_budget(part, scores, texts))), ""),
    )


def _completion(
    config: RunConfig,
    found: Sequence[tuple[Part, Scores]],
    item: Item,
    place: int,
    reward: float | None,
    failures: Mapping[int, Mapping[str, str]],
) -> ScoredCompletion:
    why = {
        part.name: text
        for section, (part, scores) in zip(config.reward, found, strict=True)
        if (text := _why(section, scores, place, item.text))
    }
    parts = {
        f"{part.name}_{name}": values[place]
        for part, scores in found
        for name, values in scores.parts.values.items()
        if not math.isnan(values[place])
    }
    return ScoredCompletion(
        place=item.place,
        prompt=item.text.prompt,
        completion=item.text.completion,
        answer=item.text.answer,
        transcript=item.transcript,
        reward=reward,
        scores={part.name: None if place in scores.absent else scores.values[place] for part, scores in found},
        parts=parts,
        why=why | dict(failures.get(place, {})),
        seconds={part.name: scores.seconds[place] for part, scores in found if place in scores.seconds},
    )


def _why(section: RewardSection, scores: Scores, place: int, item: ScoredText) -> str:
    """Return why there is no score, or a built-in reward gave 0; "": there is nothing to say."""
    if place in scores.absent:
        return "it returned None: it does not apply"
    if place in scores.unreadable:
        return f"the answer {scores.unreadable[place]}"
    if isinstance(section, StopSection) and section.require_stop and item.truncated:
        return "cut off by the length limit, and require_stop is true"
    if isinstance(section, LengthReward | OverlongReward):
        return f"{item.num_tokens} tokens"
    if scores.values[place] != 0:
        return ""
    match section:
        case ExactMatchReward():
            return f"{shown(item.completion)} is not {shown(item.answer)}"
        case FormatReward():
            return "the whole completion does not match the pattern"
        case RegexReward():
            other = f"found {shown(scores.found[place])}, not" if place in scores.found else "no match; the answer is"
            return f"{other} {shown(item.answer)}"
        case MathVerifyReward():
            return f"{_found_in(after_prompt(item.prompt, item.completion))} {shown(item.answer)}"
        case _:
            return ""


def _found_in(text: str) -> str:
    found = find_answer(text)
    if found is not None:
        return f"found {shown(found.text)}, not"
    return f"{'a thought is not closed' if conclusion(text) is None else 'no marked answer'}; the answer is"


def shown(text: str) -> str:
    """Quote a text; of a long one its end, where an answer is."""
    return repr(text if len(text) <= _SHOWN_CHARS else f"...{text[-_SHOWN_CHARS:]}")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
