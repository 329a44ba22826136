"""The interface of a training engine. Every method is called on all ranks together, with equal arguments."""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem_config.schema import TrainerSection
from trainer_service.micro_batches.checks import Limits
from trainer_service.micro_batches.samples import FloatArray, Samples
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one train step.

    Attributes:
        metrics: by name, over all ranks; they depend on the samples and the policy.
        performance: further metrics, which depend on the machine too.
        seconds: by part, of this rank.
    """

    metrics: Mapping[str, float]
    performance: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A checkpoint that is written during the training. done: its bytes; Internal: it was not written."""

    folder: Path
    done: Future[int]


class TrainerEngine(Protocol):
    """A policy spread over ranks, with its optimizer."""

    @property
    def policy_version(self) -> int:
        """0 for the initial model, +1 per train step; renumber() may skip numbers."""

    @property
    def on_gpus(self) -> bool:
        """Whether it computes on GPUs."""

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes."""

    @property
    def parallel(self) -> Parallel:
        """The parallel sizes."""

    @property
    def limits(self) -> Limits:
        """Largest sizes and token ids of samples."""

    def load(self, folder: Path) -> None:
        """Load weights from a Hugging Face folder, with a fresh optimizer, no steps done, and policy version 0."""

    def train_step(self, samples: Samples, num_updates: int) -> StepResult:
        """Run one GRPO step; the policy version grows by 1.

        Raises: NotFinite: a loss or gradient was not finite; nothing changed.
        """

    def logprobs(self, samples: Samples, *, reference: bool = False) -> tuple[FloatArray, FloatArray]:
        """Compute log-probs and entropies of the completion tokens. Returns: [T] each, on every rank; 0 where masked.

        Args:
            reference: under the reference policy.
        Raises: InvalidRequest: there is no reference policy.
        """

    def save(self, folder: Path) -> int:
        """Write everything that a restart needs, atomically. Returns: bytes written by all ranks."""

    def begin_save(self, folder: Path) -> int:
        """Begin to write what `save` writes, as it is now, while training continues; waits for the one before.

        Returns: bytes of the tensors.
        """

    @property
    def saving(self) -> Saving | None:
        """On rank 0: what `begin_save` began last, for all ranks; None: nothing yet."""

    def check_checkpoint(self, folder: Path) -> None:
        """Check a checkpoint, changing nothing. Raises: ConfigError: load_checkpoint would fail on this rank."""

    def load_checkpoint(self, folder: Path) -> None:
        """Load weights, optimizer and random states from a folder, whatever parallel sizes wrote it.

        Raises, the same on every rank:
            ConfigError: the folder is from another model or of another dtype; nothing has changed here.
            DamagedCheckpoint: its files are not as they were written; nothing has changed here.
        """

    def renumber(self, policy_version: int) -> None:
        """Set the version of the present policy to `policy_version`."""

    def tensors(self) -> Mapping[str, Any]:
        """Return this rank's live parameters (torch tensors), by the engine's own names: see `weights`."""

    def weights(self) -> AbstractContextManager[Mapping[str, float]]:
        """Have the parameters' bytes in memory inside of a `with` block; elsewhere they may be offloaded.

        Yields: seconds by part that this has taken: `onload`, and `offload` after the block.
        Raises: Internal: on every rank: there is no memory for them.
        """

    def export(self, folder: Path) -> int:
        """Write the policy as a Hugging Face folder, atomically. Returns: bytes written."""

    def finish_profiles(self, timeout_s: float) -> None:
        """Wait for the files of profiled steps, which are made during the training, at most for `timeout_s`."""

    def close(self) -> None:
        """Destroy the engine's process groups."""


def learning_rate_at(steps_done: int, iterations: int, settings: TrainerSection) -> float:
    """Compute AdamW's step size for the step after `steps_done` steps: a resumed run needs no other state.

    Args:
        iterations: run.iterations, at which a decay ends; later steps keep the last value.

    >>> settings = TrainerSection(learning_rate=1.0, learning_rate_decay="linear", warmup_iterations=2)
    >>> [round(learning_rate_at(steps, 6, settings), 3) for steps in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.25, 0.25]
    """
    warmup = settings.warmup_iterations
    if steps_done < warmup:
        return settings.learning_rate * (steps_done + 1) / warmup
    steps = max(1, iterations - warmup)
    done = min(steps_done - warmup, steps - 1) / steps
    share = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}
    return settings.learning_rate * share[settings.learning_rate_decay]
