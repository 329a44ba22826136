"""Fixtures of the trainer's integration tests: one tiny model and one running trainer for all tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.trainer.processes import TrainerProcesses
from tests.kit.models import save_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 folder."""
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen2-tied", folder)
    return folder


@pytest.fixture(scope="module")
def shared_trainer(
    module_redis: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerProcesses]:
    """TP 2, running; ends as `kill PID` ends it, which is a test too."""
    trainer = TrainerProcesses(module_redis, tmp_path_factory.mktemp("trainer"), tiny_model, tensor_parallel=2)
    with trainer.begin():
        yield trainer
        assert trainer.stop(trainer.ranks) == [0, 0]
