"""The coordinator's state, written after every iteration and with every checkpoint."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coordinator.data.cursor import CursorState
from servicekit.errors import ConfigError, Internal
from tandem_clients.flow import GroupScores
from tandem_config.schema import HELDOUT
from tandem_files.atomic import no_check, write_bytes_atomic
from tandem_files.metrics_file import set_of

# Weight syncs whose times are kept; bounded, because the file is written in every iteration.
KEPT_SYNCS = 256


class NotWritten(Internal):
    """A checkpoint, or what must be on disk before it, was not written; trainer and run are as they were."""


class ScoreCounts(BaseModel):
    """Completions that scored 0 for another reason than a wrong answer."""

    model_config = ConfigDict(extra="forbid")

    reward_errors: int = 0
    reward_timeouts: int = 0
    unreadable_answers: int = 0

    def note_scores(self, scored: GroupScores) -> None:
        """Add the counts of a batch."""
        self.reward_errors += scored.num_errors
        self.reward_timeouts += scored.num_timeouts
        self.unreadable_answers += scored.num_unreadable


class Totals(ScoreCounts):
    """Counters over the whole run, restarts included; scores are those of training."""

    heldout: ScoreCounts = Field(default_factory=ScoreCounts)
    generated_tokens: int = 0
    trained_samples: int = 0
    dropped_groups: int = 0
    dropped_samples: int = 0
    skipped_steps: int = 0
    retried_calls: int = 0
    warnings: int = 0
    # Largest |log pi_trainer - log pi_engine| of any token; None before the first step.
    logprob_abs_diff_max: float | None = None
    num_weight_syncs: int = 0
    weight_sync_max_s: float | None = None
    # Seconds of the last KEPT_SYNCS weight syncs, in order.
    weight_sync_s: list[float] = Field(default_factory=list)
    bytes_per_rollout_rank: int = 0
    redundancy: float = 0.0

    @model_validator(mode="after")
    def _count_syncs(self) -> "Totals":
        """Count the syncs in a state of an older release, which kept the times of all instead of their number."""
        if self.weight_sync_s and not self.num_weight_syncs:
            self.num_weight_syncs, self.weight_sync_max_s = len(self.weight_sync_s), max(self.weight_sync_s)
            self.weight_sync_s = self.weight_sync_s[-KEPT_SYNCS:]
        return self

    def note_sync(self, seconds: float) -> None:
        """Add a weight sync."""
        self.num_weight_syncs += 1
        self.weight_sync_max_s = max(seconds, self.weight_sync_max_s or 0.0)
        self.weight_sync_s = [*self.weight_sync_s, seconds][-KEPT_SYNCS:]


class SourceOrder(BaseModel):
    """What the order of a source's prompts depends on."""

    model_config = ConfigDict(extra="forbid")

    weight: float
    # Usable ones.
    num_prompts: int
    # Digest of all bytes of its files.
    digest: str


class DataOrder(BaseModel):
    """What the order of the prompts depends on; a position is valid only in the same order."""

    model_config = ConfigDict(extra="forbid")

    seed: int
    shuffle: bool
    sources: list[SourceOrder]
    # What prompts depend on besides their rows, by setting; texts, or digests of long ones.
    settings: dict[str, str]


class BestPolicy(BaseModel):
    """The policy with the best evaluation so far."""

    model_config = ConfigDict(extra="forbid")

    metric: str
    value: float
    # 0: the model that the run began with.
    iteration: int
    policy_version: int


class RunState(BaseModel):
    """The state of the run; only the run changes it, between awaits."""

    model_config = ConfigDict(extra="forbid")

    # Status of the process: running, finished, failed, interrupted.
    status: str = "running"
    error: str = ""
    # Token of the coordinator that wrote it (docs/weight-sync.md, Who leads); 0: an older release.
    fence: int = 0
    # Iterations completed.
    iteration: int = 0
    policy_version: int = 0
    # Id of the last train step; "": there was none, or an older release has not recorded it.
    step_id: str = ""
    # Digest of all train steps so far, by the ledger; "": no ledger has them.
    steps_digest: str = ""
    cursor: CursorState
    # State of the generator that shuffles samples into updates (NumPy's own dictionary).
    batch_rng: dict[str, Any]
    model_fingerprint: str
    order: DataOrder | None = None
    # What its rewards depend on (resuming.py); {}: an older release has not recorded it.
    rewards: dict[str, str] = Field(default_factory=dict)
    initial_accuracy: float | None = None
    last_accuracy: float | None = None
    best_accuracy: float | None = None
    # Largest standard deviation of an evaluation's scores, and whether all scores were 0 or 1 (tandem_files.Heldout).
    accuracy_std: float | None = None
    accuracy_is_share: bool = True
    # Columns `eval/...` of the evaluation before the first iteration, and the latest of each set.
    baseline: dict[str, float | None] = Field(default_factory=dict)
    evaluations: dict[str, float | None] = Field(default_factory=dict)
    # By evaluation.best.
    best: BestPolicy | None = None
    # The iteration after which the policy is evaluated that replicas of an evaluation keep; 0: there is none.
    evaluating: int = 0
    # What the figures of each evaluation set depend on (resuming.py); None: an older release has not recorded it.
    sets: dict[str, dict[str, str]] | None = None
    # By set that a resume added or changed, the iteration after which its baseline was measured.
    renewed: dict[str, int] = Field(default_factory=dict)
    # Descriptions of checkpoints that were found damaged and skipped.
    damaged_checkpoints: list[str] = Field(default_factory=list)
    # Why the checkpoints since the newest written one were not written, as sentences.
    missed_checkpoints: list[str] = Field(default_factory=list)
    # What is left of old checkpoints, exports and samples that could not be removed, as sentences.
    not_removed: list[str] = Field(default_factory=list)
    # Troubles of the training after the last iteration, as sentences (health.py).
    troubles: list[str] = Field(default_factory=list)
    # Consecutive iterations without anything to train on.
    skipped_in_a_row: int = 0
    # Seconds that the run has worked, over all restarts, without the time between them.
    wall_s: float = 0.0
    # Unix time at which the run began.
    started_s: float = Field(default_factory=time.time)
    # Unix time at which a step last began or ended.
    last_progress_s: float = Field(default_factory=time.time)
    totals: Totals = Field(default_factory=Totals)

    @model_validator(mode="after")
    def _count_waves(self) -> "RunState":
        """Count the waves of prompts in a state of an older release: one in each iteration."""
        if self.cursor.waves < 0:
            self.cursor = replace(self.cursor, waves=self.iteration)
        return self

    @property
    def wave(self) -> int:
        """The first wave of prompts of which groups are under way, or which comes next."""
        return self.cursor.waves + 1

    def save(self, path: Path, before_write: Callable[[], None] = no_check, *, durable: bool = True) -> None:
        """Write the state; a reader, even after a power cut, sees the old or the new file.

        Args:
            before_write: called immediately before the replacement; if it raises, the old file stays.
            durable: False: for watchers, which saves 5-10 ms an iteration; a restart resumes from a checkpoint.
        """
        write_bytes_atomic(path, self.model_dump_json(indent=1).encode(), before_write, durable=durable)

    @classmethod
    def load(cls, path: Path) -> "RunState":
        """Read a saved state.

        Raises: ConfigError: the file is missing or not a state of this version of Tandem.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist: the checkpoint is not complete") from None
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{path} is not a coordinator state of this release of Tandem: {place}: {first['msg']}; resume with "
                "the release that wrote it, or start a new run"
            ) from error

    def become(self, other: "RunState") -> None:
        """Copy another state into this object, so that all readers of this object see it."""
        for name in type(self).model_fields:
            setattr(self, name, getattr(other, name))

    def forget_set(self, name: str) -> None:
        """Forget what was measured on an evaluation set, which has changed or is gone."""
        for columns in (self.baseline, self.evaluations):
            for column in [column for column in columns if set_of(column) == name]:
                del columns[column]
        if name == HELDOUT:
            self.initial_accuracy = self.last_accuracy = self.best_accuracy = self.accuracy_std = None
            self.accuracy_is_share = True
        if self.best is not None and self.best.metric.rpartition("/")[0] == name:
            self.best = None
        self.renewed.pop(name, None)

    def note_accuracy(self, scored: GroupScores) -> None:
        """Record an evaluation of data.heldout."""
        accuracy, scores_S = scored.accuracy, scored.scores_PG[~np.isnan(scored.scores_PG)]
        if self.initial_accuracy is None:
            self.initial_accuracy = accuracy
        self.last_accuracy = accuracy
        self.best_accuracy = accuracy if self.best_accuracy is None else max(self.best_accuracy, accuracy)
        self.accuracy_is_share &= bool(np.isin(scores_S, (0.0, 1.0)).all())
        if scores_S.size > 1:
            self.accuracy_std = max(self.accuracy_std or 0.0, float(scores_S.std(ddof=1)))
