"""A trainer restores the checkpoints of its own run only, and its ranks read one configuration."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, ConfigurationSkew
from tandem_config.comparing.resuming import mark_of
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.run_folder import claim_run_dir
from trainer_service.ranks.world import Place
from trainer_service.worker import Worker, WorkerSettings, check_same_settings


def config(**sections: Any) -> RunConfig:
    base = {"model": {"path": Path("/models/qwen")}, "data": {"train": Path("/data/sums.jsonl")}}
    return RunConfig.model_validate(base | sections)


def place(rank: int) -> Place:
    return Place(rank=rank, world_size=2, local_rank=rank, master=None)


def worker(run_dir: Path, run_config: RunConfig, run_id: str = "first") -> Worker:
    environment = ServiceEnvironment.from_env(
        {"REDIS_URL": "redis://127.0.0.1:1", "TANDEM_RUN_ID": run_id, "TANDEM_RUN_DIR": str(run_dir)}
    )
    owner = claim_run_dir(run_dir, run_id)
    settings = WorkerSettings(config=run_config, environment=environment, place=place(0), owner=owner, resume=True)
    unused: Any = None
    return Worker(settings, unused, unused, unused)


def save(run_dir: Path, run_id: str) -> Path:
    folder = step_folder(run_dir, 4)
    folder.mkdir(parents=True)
    mark_complete(folder, iteration=4, **mark_of(config(), run_id))
    return folder


def test_a_trainer_restores_its_own_run(tmp_path: Path) -> None:
    claim_run_dir(tmp_path, "first")
    folder = save(tmp_path, "first")
    faster = config(trainer={"learning_rate": 1e-7, "tensor_parallel": 2})
    assert worker(tmp_path, faster)._checkpoints(dist.HashStore()) == [folder / "trainer"]


@pytest.mark.parametrize(
    ("run_id", "change", "told"),
    [
        ("another", {}, r"run id \(TANDEM_RUN_ID\): another in the checkpoint, first in the run"),
        ("first", {"run": {"seed": 7}}, "run.seed: 0 in the checkpoint, 7 in the run"),
    ],
)
def test_a_trainer_refuses_a_checkpoint_of_another_run_by_name(
    tmp_path: Path, run_id: str, change: dict[str, Any], told: str
) -> None:
    claim_run_dir(tmp_path, "first")
    save(tmp_path, run_id)
    with pytest.raises(ConfigError, match=rf"cannot resume from .*/step-00000004: {told}: give back what was"):
        worker(tmp_path, config(**change))._checkpoints(dist.HashStore())


def test_ranks_that_have_read_different_files_are_refused_by_name() -> None:
    store = dist.HashStore()
    check_same_settings(store, place(0), config())
    check_same_settings(store, place(1), config(run={"keep_checkpoints": 5}))
    with pytest.raises(ConfigurationSkew, match=r"trainer\.tensor_parallel: 2 here, 1 there"):
        check_same_settings(store, place(1), config(trainer={"tensor_parallel": 2}))
    with pytest.raises(ConfigurationSkew, match=r"rank 1 has read .* than rank 0: run\.seed: 7 here, 0 there: restart"):
        check_same_settings(store, place(1), config(run={"seed": 7}))
