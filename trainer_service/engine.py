"""What the service asks of a training engine. Every method is called on all ranks together, with equal arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer_service.batch.checks import Limits
from trainer_service.batch.samples import FloatArray, Samples
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """metrics by name, over all ranks; seconds by part, of this rank."""

    metrics: Mapping[str, float]
    seconds: Mapping[str, float]


class TrainerEngine(Protocol):
    """A policy spread over ranks, with its optimizer."""

    @property
    def policy_version(self) -> int:
        """0 for the initial model, +1 per train step; renumber() may leave numbers out."""

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes."""

    @property
    def parallel(self) -> Parallel:
        """How it is spread."""

    @property
    def limits(self) -> Limits:
        """What a sample may be."""

    def load(self, folder: Path) -> None:
        """Weights from a Hugging Face folder; fresh optimizer; no steps done; policy version 0."""

    def train_step(self, samples: Samples, num_updates: int) -> StepResult:
        """One GRPO step; the policy version grows by 1. Raises: NotFinite: nothing changed."""

    def logprobs(self, samples: Samples) -> tuple[FloatArray, FloatArray]:
        """Log-probs and entropies of the completion tokens, [T] each, on every rank."""

    def save(self, folder: Path) -> int:
        """Everything that a restart needs, atomically. Returns: bytes written by all ranks."""

    def check_checkpoint(self, folder: Path) -> None:
        """Changes nothing. Raises: ConfigError: load_checkpoint would fail on this rank."""

    def load_checkpoint(self, folder: Path) -> None:
        """Raises, on every rank alike: ConfigError: the folder is from another model, or another parallel layout;
        DamagedCheckpoint: its files are not what was written, and nothing has changed here."""

    def renumber(self, policy_version: int) -> None:
        """The same policy is called `policy_version` from now on."""

    def tensors(self) -> Mapping[str, Any]:
        """This rank's live parameters (torch tensors) by the engine's own names."""

    def export(self, folder: Path) -> int:
        """The policy as a Hugging Face folder, atomically. Returns: bytes written."""

    def close(self) -> None:
        """Gives up the engine's process groups."""
