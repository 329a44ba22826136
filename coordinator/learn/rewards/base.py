"""What a reward is: texts with reference answers in, scores out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

# Names of the parts of a score become names of metrics.
PART_NAME = re.compile(r"[A-Za-z]\w{0,39}", re.ASCII)
MOST_PARTS = 16


@dataclass(kw_only=True, slots=True)
class ScoredText:
    """A completion's text with what it is scored against."""

    # Without special tokens.
    completion: str
    answer: str
    # Cut off by the length limit: it has not stopped by itself.
    truncated: bool
    # Tokens of the completion, its stop token included.
    num_tokens: int = 0
    # What was tokenized: the prompt's column, or its messages in the chat template.
    prompt: str = ""
    # All columns of the row.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # As in the trainer's errors: i12.g3.row77#5.
    sample_id: str = ""
    # The same for all completions of a prompt; they are neighbours.
    group: int = 0
    # Of the policy's tokenizer, special tokens included.
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()


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
    # [S] parts of the values by name, for the run's figures only.
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)


def parts_of(found: Mapping[int, Mapping[str, float]], size: int) -> dict[str, list[float]]:
    """Return [S] values of each part by its name; a sample that lacks one has 0.0.

    Args:
        found: parts of samples, by their places.
        size: S.

    >>> parts_of({1: {"tone": 0.5}}, 3)
    {'tone': [0.0, 0.5, 0.0]}
    """
    parts = {name: [0.0] * size for of_sample in found.values() for name in of_sample}
    for place, of_sample in found.items():
        for name, value in of_sample.items():
            parts[name][place] = value
    return parts


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
        """Which columns of the rows it takes, beside prompt and answer; known once it is started."""
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

        def spread(values: Sequence[float]) -> list[float]:
            found = dict(zip(whole, values, strict=True))
            return [found.get(place, 0.0) for place in range(len(items))]

        return replace(
            scores,
            values=spread(scores.values),
            errors={whole[place]: why for place, why in scores.errors.items()},
            late=frozenset(whole[place] for place in scores.late),
            unreadable={whole[place]: why for place, why in scores.unreadable.items()},
            parts={name: spread(values) for name, values in scores.parts.items()},
        )

    async def close(self) -> None:
        """Close the reward."""
        await self._reward.close()
