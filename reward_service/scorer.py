"""What a scorer gets and gives: the types of a reward server, without the wire."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSample:
    """A completion, and what it belongs to; protos/tandem_api/reward/v1/reward.proto describes each field."""

    sample_id: str
    group: int
    prompt: str
    completion: str
    answer: str
    columns: Mapping[str, Any]
    num_tokens: int
    truncated: bool
    prompt_token_ids: Sequence[int] = ()
    completion_token_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleScore:
    """A finite score, and its parts by name, which only appear among the run's figures."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotScored:
    """Why a sample has no score; the run treats it as its `on_error` says."""

    why: str


Outcome = float | SampleScore | NotScored


class RewardScorer(ABC):
    """Scores samples; its class attributes say what it is and what it needs."""

    # For people: a run logs both.
    name: str = "scorer"
    version: str = "1"
    # Most samples of a call; 0: any number.
    max_batch_size: ClassVar[int] = 0
    # Columns that the rows of a run's data must have.
    required_columns: ClassVar[tuple[str, ...]] = ()
    needs_token_ids: ClassVar[bool] = False
    # Completions of a prompt are scored against each other: a call has all of them, as neighbours.
    needs_whole_groups: ClassVar[bool] = False
    # Calls of `score` at a time, each in a thread of its own.
    threads: ClassVar[int] = 1

    def load(self) -> None:
        """Get ready, in a thread; the server answers meanwhile that it is not serving yet."""
        return

    @abstractmethod
    def score(self, samples: Sequence[RewardSample]) -> Sequence[Outcome]:
        """Return an outcome for each sample, in their order; an exception fails all of them, with its text."""
