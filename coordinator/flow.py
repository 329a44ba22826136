"""What flows from step to step, as plain data: prompts, groups of completions, scores, a batch, what a sync cost.

Legend: P prompts (one group each), G completions per prompt, S = P * G samples, T tokens of one completion.
Token ids and log-probs are kept as compact `array.array`s (4 bytes an item): a protobuf field is filled from and read
into them faster than NumPy, which boxes every item, and they hold a long batch in a tenth of a list's memory.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tandem_api.trainer.v1 import trainer_pb2

# Whose prompts were scored: the key of the section `data`.
DataKey = Literal["train", "heldout"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Scores of groups."""

    # [P, G] scores times reward.weight: what advantages are made of.
    rewards_PG: NDArray[np.float64]
    # Mean of the unweighted scores: the share of right answers for 0/1 rewards.
    accuracy: float
    num_errors: int = 0
    first_error: str = ""
    num_timeouts: int = 0
    # Completions whose prompt's answer cannot be read, so that none of them could score.
    num_unreadable: int = 0
    # Those answers: row of the data file -> why.
    unreadable_rows: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """Everything that one TrainStep sends."""

    step_id: str
    policy_version: int
    num_samples: int
    num_updates: int
    chunks: tuple[trainer_pb2.SampleChunk, ...]

    def requests(self) -> Iterator[trainer_pb2.TrainStepRequest]:
        """The request stream: a header, then the chunks in ascending order of their update."""
        yield trainer_pb2.TrainStepRequest(
            header=trainer_pb2.TrainStepHeader(
                step_id=self.step_id,
                policy_version=self.policy_version,
                num_updates=self.num_updates,
                num_samples=self.num_samples,
            )
        )
        for chunk in self.chunks:
            yield trainer_pb2.TrainStepRequest(chunk=chunk)


class ReplicaOutcome(Enum):
    """How a round ended for one replica."""

    # Serves the new version.
    COMMITTED = "committed"
    # No byte of it was written: what the replica had before is intact.
    ABORTED = "aborted"
    # Bytes may be partly written: it must be seeded again before it may serve.
    POISONED = "poisoned"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """A committed round."""

    policy_version: int
    # Rounds that it took; 1 without failures.
    attempts: int
    # Wall seconds from the first phase's start to the last one's end, failed rounds included.
    total_s: float
    # Stage to the seconds of the participant that took longest over it.
    stages: dict[str, float]
    # Of the rollout rank that received most.
    bytes_per_rollout_rank: int
    # Over all rollout ranks.
    bytes_received: int
    # Bytes received / bytes of the ranks' own shards: 1.0 means that nothing travelled twice or for nothing.
    redundancy: float
    # By replica, of the last round that it was in.
    outcomes: Mapping[str, ReplicaOutcome] = field(default_factory=dict)
    # The weight group's epoch in the last round.
    epoch: int = 0
    # Replica to the seconds that its slowest rank worked, over all stages.
    replica_s: Mapping[str, float] = field(default_factory=dict)
