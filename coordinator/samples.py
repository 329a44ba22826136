"""What flows through an iteration, as plain data: prompts, their completions, groups of completions.

Legend: P prompts (one group each), G completions per prompt, S = P * G samples, T tokens of one completion.
Token ids and log-probs are kept as compact `array.array`s (4 bytes an item): a protobuf field is filled from and read
into them faster than NumPy, which boxes every item, and they hold a long batch in a tenth of a list's memory.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A row of the data, tokenized."""

    # 1-based line (JSONL) or row (Parquet): how errors and sample ids name it.
    row: int
    token_ids: Sequence[int]
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion of T tokens."""

    # [T] ids, the stop token included when one was sampled.
    token_ids: "array[int]"
    # [T] natural logarithms at the sampling temperature.
    logprobs: "array[float]"
    # Cut off by max_new_tokens.
    truncated: bool
    # Oldest policy version among the tokens.
    oldest_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All G completions of one prompt."""

    group_id: str
    prompt: Prompt
    completions: tuple[Completion, ...]

    def sample_id(self, index: int) -> str:
        """Name of a sample, as the trainer's errors repeat it: `i12.g3.row77#5`."""
        return f"{self.group_id}#{index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What the replicas produced for a list of prompts, in the prompts' order."""

    groups: tuple[Group, ...]
    # Seconds that the busiest replica's engine worked.
    engine_s: float
    # Calls that failed and whose groups were generated elsewhere or again.
    retried_calls: int

    @property
    def num_tokens(self) -> int:
        """Completion tokens over all samples."""
        return sum(len(completion.token_ids) for group in self.groups for completion in group.completions)
