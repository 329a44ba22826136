"""trainer.collective_timeout_s reaches Megatron's own groups: with NCCL nothing else notices a rank that was killed."""

from typing import Any

import pytest
import torch

from tandem_config.schema import RunConfig
from tests.house.repository import REPO
from trainer_service.megatron_engine import build
from trainer_service.megatron_engine.engine import MegatronEngine
from weightsync.layouts.layout import Parallel


def test_megatrons_groups_have_the_configured_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state, tensor_parallel  # not before `build`, which prepares it for CPUs

    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda *_, **options: given.update(options))
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed: None)
    build.initialize_parallel(Parallel(tensor=2), 0, 300.0)
    assert given["distributed_timeout_minutes"] * 60 == 300.0


def test_it_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Called(Exception):
        """With these arguments."""

    def ask(*arguments: object) -> None:
        raise Called(*arguments)

    monkeypatch.setattr(build, "initialize_parallel", ask)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(REPO / "examples" / "arithmetic" / "model")},
            "data": {"train": "t"},
            "run": {"seed": 5},
            "trainer": {"collective_timeout_s": 77.0},
        }
    )
    with pytest.raises(Called) as asked:
        MegatronEngine(config, torch.device("cpu"))
    assert asked.value.args == (Parallel(engine="megatron"), 5, 77.0)
