"""Fixtures of the coordinator's contract tests: a small run's configuration and environment."""

from pathlib import Path

import pytest

from coordinator.ledger import returning
from servicekit.environment import ServiceEnvironment
from servicekit.logs import configure_logging
from tandem_config.schema import RunConfig
from tests.kit.folders import write_data, write_small_model

PROBLEMS = [(a, b) for a in range(10, 30) for b in range(10, 15)]


@pytest.fixture(autouse=True, scope="session")
def _json_logs() -> None:
    # structlog's default renders every traceback with rich, which takes a second.
    configure_logging("test")


@pytest.fixture
def brief_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer of this process that fails a step is not about to end: no test waits 5 s for news of that."""
    monkeypatch.setattr(returning, "NEWS_S", 0.1)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "t", "iterations": 6, "checkpoint_every": 2, "evaluate_every": 2, "startup_timeout_s": 10},
            "model": {"path": write_small_model(tmp_path / "model")},
            "data": {
                "train": write_data(tmp_path / "train.jsonl", PROBLEMS[:60]),
                "heldout": write_data(tmp_path / "heldout.jsonl", PROBLEMS[60:]),
            },
            "grpo": {"prompts_per_iteration": 8, "group_size": 4, "max_new_tokens": 4, "updates_per_iteration": 2},
            "rollout": {"replicas": 2},
            "sync": {"formation_timeout_s": 5, "transfer_timeout_s": 5},
        }
    )


@pytest.fixture
def environment(tmp_path: Path, redis_server: str) -> ServiceEnvironment:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return ServiceEnvironment(REDIS_URL=redis_server, TANDEM_RUN_ID="t", TANDEM_RUN_DIR=run_dir)
