"""What a reward is: texts with reference answers in, scores out."""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

# Names of the parts of a score become names of metrics.
_LONGEST = 40
PART_NAME = re.compile(rf"[A-Za-z]\w{{0,{_LONGEST - 1}}}", re.ASCII)
MOST_PARTS = 16
_NOT_IN_NAMES = re.compile(r"\W+", re.ASCII)


@dataclass(kw_only=True, slots=True)
class ScoredText:
    """A completion's text with what it is scored against."""

    # Without the tokens that end it (rollout.skip_special_tokens: without any special one); of several turns the last.
    completion: str
    answer: str
    # Cut off by the length limit: it has not stopped by itself.
    truncated: bool
    # Tokens that the policy has sampled, its stop token included.
    num_tokens: int = 0
    # What was tokenized: the prompt's column, or its messages in the chat template.
    prompt: str = ""
    # The prompt before the chat template, and all turns before the last; None: it is a text.
    messages: Sequence[Mapping[str, Any]] | None = None
    # All columns of the row.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # As in the trainer's errors: i12.g3.row77#5.
    sample_id: str = ""
    # The same for all completions of a prompt; they are neighbours.
    group: int = 0
    # What the environment gave for all turns; None: nothing. Why it failed; "": it has not.
    episode_reward: float | None = None
    episode_error: str = ""
    # Ids of the policy's tokenizer, special tokens included.
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Parts of the scores of S samples, as the run reports them.

    Attributes:
        values: [S] by name; NaN: the sample has none.
        remarks: what was left out of parts, and how they are called, by the part's own name (and "left out").
        num_left_out: values that were left out.
    """

    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    num_left_out: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """[S] scores, and which of them are 0 for another reason than a wrong completion."""

    values: list[float]
    # Items whose scoring failed -> why; quotes no completion, unless the user's own code does.
    errors: Mapping[int, str] = field(default_factory=dict)
    # Items that took longer than the reward's timeout_s.
    late: frozenset[int] = frozenset()
    # Items whose *answer* cannot be read, so that no completion could score -> why.
    unreadable: Mapping[int, str] = field(default_factory=dict)
    # Items to which the reward does not apply: they have no such score.
    absent: frozenset[int] = frozenset()
    # Parts of the values, for the run's figures only.
    parts: Parts = field(default_factory=Parts)
    # Items that scored 0 -> what was found in place of the answer.
    found: Mapping[int, str] = field(default_factory=dict, compare=False)
    # Items -> seconds that scoring took, of the whole call for those that were scored together.
    seconds: Mapping[int, float] = field(default_factory=dict, compare=False)

    def at(self, places: Sequence[int], size: int, others: float) -> "Scores":
        """Return the scores of `size` items, of which these are those at `places`; the others have a score."""

        def spread(values: Sequence[float], filling: float) -> list[float]:
            found = dict(zip(places, values, strict=True))
            return [found.get(place, filling) for place in range(size)]

        parts = {name: spread(values, math.nan) for name, values in self.parts.values.items()}
        return replace(
            self,
            values=spread(self.values, others),
            errors={places[place]: why for place, why in self.errors.items()},
            late=frozenset(places[place] for place in self.late),
            unreadable={places[place]: why for place, why in self.unreadable.items()},
            absent=frozenset(places[place] for place in self.absent),
            parts=replace(self.parts, values=parts),
            found={places[place]: text for place, text in self.found.items()},
            seconds={places[place]: seconds for place, seconds in self.seconds.items()},
        )


def parts_of(found: Mapping[int, Mapping[str, float]], size: int) -> Parts:
    """Collect the parts of samples, by their places. A part is only reported: no name or number fails a score.

    >>> parts_of({1: {"tone": 0.5, "acc/strict": math.nan}}, 3).values
    {'tone': [nan, 0.5, nan], 'acc_strict': [nan, nan, nan]}
    """
    names: dict[str, str] = {}
    values: dict[str, list[float]] = {}
    remarks: dict[str, str] = {}
    left_out = Counter[str]()
    for place, of_sample in found.items():
        for given, value in of_sample.items():
            if given not in names:
                names[given] = _reported(given, values)
                values |= {names[given]: [math.nan] * size} if len(values) < MOST_PARTS else {}
                if names[given] != given:
                    remarks[given] = f"part {given!r:.60} is reported as {names[given]}"
            if names[given] in values and math.isfinite(value):
                values[names[given]][place] = value
            else:
                left_out[given] += 1
    for given, number in left_out.items():
        why = "is not a finite number" if names[given] in values else f"is one of more than {MOST_PARTS} parts"
        remarks[f"{given} left out"] = (
            f"part {given!r:.60} {why} in {number} of {size} completions, and is left out of its mean there"
        )
    return Parts(values=values, remarks=remarks, num_left_out=left_out.total())


def _reported(given: str, taken: Collection[str]) -> str:
    """Return a name that metrics can have, and no other part has."""
    name = _NOT_IN_NAMES.sub("_", given).strip("_")[:_LONGEST]
    name = name if PART_NAME.fullmatch(name) else f"part_{name}".rstrip("_")[:_LONGEST]
    numbered = (f"{name[: _LONGEST - 3]}_{number}" for number in range(2, MOST_PARTS + 2))
    return next(other for other in (name, *numbered) if other not in taken)


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenColumns:
    """Which columns of the data's rows a reward takes.

    Attributes:
        required: every row must have them.
        optional: where a row has them.
        everything: all that a row has.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    everything: bool = False


class Reward(Protocol):
    """Scores completions; does not block the event loop for longer than a few milliseconds."""

    @property
    def takes(self) -> TakenColumns:
        """Which columns of the rows it takes, besides prompt and answer; known once it is started."""
        return TakenColumns()

    async def start(self, columns: Sequence[str]) -> None:
        """Get ready, so that what cannot work is found before the run begins; most rewards need not.

        Args:
            columns: the columns that rows of the data have.
        Raises: ValueError: it cannot score; says why and what to do.
        """
        return

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] finite scores, 1.0 for a right answer; a completion that could not be scored has 0.0."""

    async def close(self) -> None:
        """Release processes, if there are any; idempotent."""
        return


class StoppedOnly(Reward):
    """`require_stop`: 0.0 for completions that were cut off by the length limit, whatever their text.

    Args:
        reward: scores the other completions.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    @property
    def takes(self) -> TakenColumns:
        """Those of the reward."""
        return self._reward.takes

    async def start(self, columns: Sequence[str]) -> None:
        """Start the reward."""
        await self._reward.start(columns)

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores."""
        whole = [place for place, item in enumerate(items) if not item.truncated]
        scores = await self._reward.score([items[place] for place in whole])
        return scores.at(whole, len(items), others=0.0)

    async def close(self) -> None:
        """Close the reward."""
        await self._reward.close()
