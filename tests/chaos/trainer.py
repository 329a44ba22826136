"""A trainer rank of the chaos tests: the real service, with plain tensors in the place of Megatron."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import trainer_service.app as trainer_app
import trainer_service.worker as trainer_worker
from tandem_files.run_folder import RunIdentity
from tests.chaos.members import GatedMember, begin, set_up_gates
from tests.chaos.policy import SPECS, TRAINER, shard_of
from trainer_service.engine import StepResult
from trainer_service.micro_batches.checks import Limits
from trainer_service.micro_batches.samples import FloatArray, Samples
from trainer_service.ranks.world import Place
from trainer_service.worker import WorkerSettings
from weightsync.layouts.megatron import megatron_layout


class FakeTrainerEngine:
    """A trainer of plain tensors: a step gives all of them other numbers."""

    def __init__(self, rank: int, policy_version: int, size: str) -> None:
        self.policy_version = policy_version
        self.spec = SPECS[size]
        self.parallel = TRAINER
        self.limits = Limits(vocab_size=100, max_positions=64, max_tokens=1024)
        self._rank = rank
        self._size = size
        self._layout = megatron_layout(self.spec, TRAINER)
        self._tensors = shard_of(self._layout, rank, policy_version, size)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def weights(self) -> AbstractContextManager[Mapping[str, float]]:
        return nullcontext({})

    def train_step(self, samples: Samples, num_updates: int) -> StepResult:
        self.policy_version += 1
        self._fill(self.policy_version)
        return StepResult(metrics={"loss": 0.0, "grad_norm": 0.0}, performance={}, seconds={"pack": 0.0})

    def load(self, folder: Path) -> None:
        """The initial model."""
        self._fill(0)

    def load_checkpoint(self, folder: Path) -> None:
        """A file that says which version's numbers these are."""
        self._fill(int((folder / "version").read_text()))

    def check_checkpoint(self, folder: Path) -> None:
        """Whatever load_checkpoint needs is there."""

    def renumber(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def _fill(self, version: int) -> None:
        for name, tensor in shard_of(self._layout, self._rank, version, self._size).items():
            self._tensors[name].copy_(tensor)

    def logprobs(self, samples: Samples, *, reference: bool = False) -> tuple[FloatArray, FloatArray]:
        return np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.float32)

    def finish_profiles(self, timeout_s: float) -> None:
        """Nothing is profiled."""

    def close(self) -> None:
        """Nothing to give up."""


def main(settings: dict[str, Any]) -> None:
    """A trainer rank."""
    config, environment = begin(settings)
    rank = int(settings["rank"])
    set_up_gates(Path(settings["folder"]), f"trainer-{rank}")

    class Worker(trainer_worker.Worker):
        def _load(self, store: Any, device: torch.device) -> Any:
            return FakeTrainerEngine(rank, int(settings["policy_version"]), settings["size"])

    mock.patch.object(trainer_worker, "SyncMember", GatedMember).start()
    mock.patch.object(trainer_app, "Worker", Worker).start()
    place = Place(rank=rank, world_size=TRAINER.world_size, local_rank=rank, master=None)
    owner = RunIdentity(run_id=environment.run_id)
    trainer_app.run(WorkerSettings(config=config, environment=environment, place=place, owner=owner, resume=False))
