"""The data that steps pass on: prompts, orders, groups of completions, scores, a batch, the figures of a sync.

Legend: P prompts (one group each), G completions per prompt, S = P * G samples, T tokens of one completion.
None of them knows protobuf: the clients of the services do. Token ids and log-probs are kept as compact `array.array`s,
4 bytes an item: they are the bytes that messages hold. A list takes ten times the memory.
What there is one of for each sample (Completion, ScoredText, Sample) is not frozen: a frozen one takes three times as
long to make, between generation and training.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from tandem_clients.transcript import Transcript

# Whose prompts were scored: a key of the configuration's section `data`.
DataKey = Literal["train", "heldout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A row of the data, tokenized."""

    # 1-based line (JSONL) or row (Parquet), as in errors and sample ids.
    row: int
    token_ids: "array[int]"
    answer: str
    # The row's file, its name in group ids ("" if the data are a single file), and the name of its source.
    file: str = ""
    file_label: str = ""
    source: str = ""
    # What was tokenized: the prompt's column, or its messages in the chat template.
    text: str = ""
    # Before the chat template; None: the prompt is a text.
    messages: Sequence[Mapping[str, Any]] | None = None
    # Those of them at the end that an environment has said; None: it has not been asked.
    opening: Sequence[Mapping[str, Any]] | None = None
    # All columns of the row, as JSON would hold them: for rewards, and to show them next to samples.
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The row's name in group ids: `row77`, or `gsm8k.row77` if there are several files."""
        return f"{self.file_label}.row{self.row}" if self.file_label else f"row{self.row}"

    @property
    def place(self) -> str:
        """The row's file and number, as in messages about the data: `data/gsm8k.jsonl:77`."""
        return f"{self.file}:{self.row}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are sampled; the defaults keep the full distribution, which training needs."""

    # 0 is greedy.
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    # Texts that end a completion.
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    # -1: all tokens.
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def can_continue(self) -> bool:
        """Whether a completion can continue on another replica: SGLang looks for these in its own tokens only."""
        return not self.stop and self.repetition_penalty == 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Which policy version to sample, how many completions per prompt, and how."""

    policy_version: int
    num_completions: int
    sampling: Sampling
    # With it a group's completions are a function of it, the group's id, the prompt and the weights. None: random.
    seed: int | None = None

    def group_seed(self, group_id: str) -> int | None:
        """Return the seed of a group, whose id holds iteration, place and row; None: its completions are random."""
        return None if self.seed is None else xxhash.xxh3_64_intdigest(f"{self.seed}/{group_id}".encode())


@dataclass(kw_only=True, slots=True)
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
    # (end, policy version) of consecutive runs of tokens; the last end is T.
    version_spans: tuple[tuple[int, int], ...] = ()
    # [T] 0: the policy has not sampled the token (a tool's answer, another's turn), so that it is read and not trained
    # on; None: it has sampled all of them.
    loss_mask: "array[int] | None" = None
    # What was said, where an environment has answered; None: there is none.
    transcript: Transcript | None = None
    # Where branches begin: what is sampled from there on follows neither the prompt nor any token before, but the first
    # tokens of the branch, which are masked.
    branches: tuple[int, ...] = ()

    @property
    def last_turn_ids(self) -> "array[int]":
        """The ids that follow the last answer of an environment; all, where none has answered."""
        if self.transcript is None or self.loss_mask is None:
            return self.token_ids
        return self.token_ids[self.loss_mask.tobytes().rfind(0) + 1 :]

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy has sampled."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All G completions of one prompt."""

    group_id: str
    prompt: Prompt
    completions: tuple[Completion, ...]

    def sample_id(self, index: int) -> str:
        """Return the name of a sample, as in the trainer's errors: `i12.g3.row77#5`."""
        return f"{self.group_id}#{index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Completions of a list of prompts, in the prompts' order."""

    groups: tuple[Group, ...]
    # Seconds of work of the busiest replica's engine.
    engine_s: float
    # Calls that failed, whose groups were generated elsewhere or again, and why the last one of each replica did.
    retried_calls: int
    call_errors: tuple[str, ...] = ()
    # Seconds that completions ran, all together; how many can run at a time, 0: not known; how many did at most.
    running_s: float = 0.0
    slots: int = 0
    most_running: int = 0
    # Finished groups that wait for a later step.
    waiting: int = 0
    # Tokens after which completions continued elsewhere, or after a pause that had aborted them.
    resumed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Completion tokens over all samples, those that the policy has sampled."""
        return sum(completion.num_sampled for group in self.groups for completion in group.completions)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """Scores of groups."""

    # [P, G] sums of the weighted scores: the input of the advantages.
    rewards_PG: NDArray[np.float64]
    # Mean of the unweighted scores: the share of right answers for 0/1 rewards; NaN: no sample has one.
    accuracy: float
    # Name of the reward whose unweighted scores the accuracy is the mean of.
    accuracy_part: str = ""
    # [P, G] True: a score of the sample could not be found (`on_error: drop`), or no reward applies to it, so that its
    # 0 in `rewards_PG` means nothing: it takes part in no mean and is not trained on. None: there is no such sample.
    missing_PG: NDArray[np.bool_] | None = None
    # [P, G] unweighted scores by the reward's name, the accuracy's first, then their parts; NaN: the sample has none.
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    # Place of a sample in the rows of `rewards_PG`, one after the other -> the reward's name -> why it could not score.
    failures: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    num_errors: int = 0
    first_error: str = ""
    num_timeouts: int = 0
    # Completions whose prompt has an unreadable answer, so that none of them could score.
    num_unreadable: int = 0
    # Prompt.place -> why its answer cannot be read.
    unreadable_rows: Mapping[str, str] = field(default_factory=dict)
    # Scores that rewards did not give since they do not apply, and values of parts that cannot be reported.
    num_absent: int = 0
    num_parts_left_out: int = 0
    # Warnings for the run's user, each once, by what they are about.
    remarks: Mapping[str, str] = field(default_factory=dict)

    @property
    def scores_PG(self) -> NDArray[np.float64]:
        """[P, G] scores whose mean is the accuracy; NaN: the sample has none."""
        scores_PG = self.parts.get(self.accuracy_part, self.rewards_PG)
        return np.where(self.present_PG, scores_PG, np.nan)

    @property
    def present_PG(self) -> NDArray[np.bool_]:
        """[P, G] True: the sample has a reward."""
        return np.ones(self.rewards_PG.shape, dtype=np.bool_) if self.missing_PG is None else ~self.missing_PG

    def present_parts(self) -> dict[str, NDArray[np.float64]]:
        """Return the values of each of `parts`, of the samples that have a reward and this value."""
        present_PG = self.present_PG
        return {name: values_PG[present_PG & ~np.isnan(values_PG)] for name, values_PG in self.parts.items()}

    @property
    def num_missing(self) -> int:
        """The number of samples without a reward."""
        return int(self.rewards_PG.size - self.present_PG.sum())


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """What an iteration's completions lose for being unlikely under the reference policy.

    Attributes:
        penalties_PG: [P, G] what is taken off each reward; 0 for samples without one.
        metrics: kl_reference (k3, mean over tokens) and kl_reward (mean over samples of what is taken off).
        seconds: of the trainer's forward passes.
    """

    penalties_PG: NDArray[np.float64]
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AdvantageResult:
    """Advantages of an iteration's samples, and which groups or samples have none."""

    advantages_PG: NDArray[np.float64]
    # [P, G] True: the sample has no reward; None: there is no such sample.
    missing_PG: NDArray[np.bool_] | None
    # [P] groups whose rewards are all equal, and those left out of training.
    zero_variance_P: NDArray[np.bool_]
    dropped_P: NDArray[np.bool_]
    # [P, G] True: the sample is left out as too old, though it counts in its group's statistics; None: none is.
    old_PG: NDArray[np.bool_] | None = None

    @property
    def left_out_PG(self) -> NDArray[np.bool_]:
        """[P, G] True: the sample has no reward, or is too old."""
        none_PG = np.zeros(self.advantages_PG.shape, dtype=np.bool_)
        return (none_PG if self.missing_PG is None else self.missing_PG) | (
            none_PG if self.old_PG is None else self.old_PG
        )


@dataclass(kw_only=True, slots=True)
class Sample:
    """One completion with its prompt and advantage, as the trainer gets it."""

    sample_id: str
    prompt: Prompt
    completion: Completion
    advantage: float
    # False: counts in no loss, but still in the denominators (a masked truncation).
    trainable: bool

    @property
    def group_id(self) -> str:
        """Name of its group, see Group.sample_id."""
        return self.sample_id.rpartition("#")[0]


def policy_tokens(samples: Sequence[Sample]) -> "array[int]":
    """Return, sample by sample, 1 for each completion token that the policy has sampled and 0 for the others."""
    out = array("B")
    for sample in samples:
        mask = sample.completion.loss_mask
        out.frombytes(b"\1" * len(sample.completion.token_ids) if mask is None else mask.tobytes())
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """Everything that one TrainStep call sends."""

    step_id: str
    policy_version: int
    # Those of each optimizer update, in their order.
    updates: tuple[tuple[Sample, ...], ...]

    @property
    def num_samples(self) -> int:
        """Count the samples of all updates."""
        return sum(map(len, self.updates))


# Parts of a step that are the model's own work.
_COMPUTING = ("old_logprobs", "reference", "forward_backward", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Result of one train step."""

    step_id: str
    # The version after the step.
    policy_version: int
    # Figures of the step, by their names in tandem_files/metrics_table.py.
    metrics: dict[str, float]
    # Seconds by part: receive, pack, old_logprobs, reference (with a KL term), forward_backward, optimizer, onload and
    # offload (of trainer.offload), total.
    seconds: dict[str, float]

    @property
    def compute_s(self) -> float:
        """Seconds of the model's own work; the rest of a step is Tandem's overhead."""
        return sum(self.seconds.get(part, 0.0) for part in _COMPUTING)


class ReplicaOutcome(Enum):
    """How a round ended for one replica."""

    # Serves the new version.
    COMMITTED = "committed"
    # No byte of the new version was written: the replica still has its previous one.
    ABORTED = "aborted"
    # Bytes may be partly written: it must be seeded again before it may serve.
    POISONED = "poisoned"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """A committed round."""

    policy_version: int
    # Rounds until the commit; 1 without failures.
    attempts: int
    # Wall seconds from the first look for participants to the last phase's end, failed rounds included.
    total_s: float
    # Seconds by stage, which add up to total_s: of the phases (weightsync/round/phases.py), roll_call, retries, other.
    stages: dict[str, float]
    # Bytes received by the rollout rank that received most.
    bytes_per_rollout_rank: int
    # Bytes received by all rollout ranks.
    bytes_received: int
    # Bytes received / bytes of the ranks' own shards: 1.0 means that nothing was sent twice or in vain.
    redundancy: float
    # By replica, its outcome in the last round that it took part in.
    outcomes: Mapping[str, ReplicaOutcome] = field(default_factory=dict)
    # The weight group's epoch in the last round.
    epoch: int = 0
    # By replica, the seconds of its slowest rank, over all stages.
    replica_s: Mapping[str, float] = field(default_factory=dict)
    source: str = ""  # the replica that has sent; "": the trainer


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """The results of an iteration."""

    iteration: int
    # After the iteration.
    policy_version: int
    generation: Generation
    scored: GroupScores
    # [P, G] advantage of each completion.
    advantages_PG: NDArray[np.float64]
    # [P] groups whose rewards are all equal, and those left out of training.
    zero_variance_P: NDArray[np.bool_]
    dropped_P: NDArray[np.bool_]
    # None: nothing to train on.
    step: TrainResult | None
    sync: SyncResult | None
    # Samples by age in versions; mean age of a token, and of the oldest one before it in its completion.
    staleness: Mapping[int, int]
    mean_ages: tuple[float, float] = (0.0, 0.0)
    # What is taken off the rewards; None: nothing is.
    divergence: Divergence | None = None
    # Differences of trainer and engine that were measured apart; None: none were.
    compared: Mapping[str, float] | None = None
    # [P, G] True: left out as too old; None: none is. And the tokens of trained groups that are not trained for that.
    old_PG: NDArray[np.bool_] | None = None
    masked_tokens: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether any sample is of an older policy than the one that was trained."""
        return max(self.staleness, default=0) > 0

    @property
    def mismatch(self) -> Mapping[str, float]:
        """The differences of trainer and engine for one policy, by names of the step's figures; {}: not measured.

        Samples of an older policy differ for that reason.
        """
        if self.compared is not None:
            return self.compared
        return {} if self.step is None or self.is_stale else self.step.metrics
