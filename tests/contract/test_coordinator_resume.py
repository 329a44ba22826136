"""Runs are separate things: a second run begins at iteration 0, and never continues or finishes the first."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import list_complete, mark_complete, read_complete
from tandem_files.run_config import NEXT_CONFIG, RESOLVED_CONFIG
from tests.contract.coordinator_runs import rows, saved_state, variables_of, with_settings, write_config
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer

OTHERS: dict[str, dict[str, Any]] = {
    "name": {"run": {"name": "second"}},
    "seed": {"run": {"seed": 7}},
    "reward": {"reward": [{"kind": "math_verify"}]},
}


async def run(config: RunConfig, environment: ServiceEnvironment, policy_version: int = 0) -> FakeTrainer:
    trainer = FakeTrainer(policy_version=policy_version)
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=True, stop=asyncio.Event()) == 0
    return trainer


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def of_run(environment: ServiceEnvironment, run_id: str) -> ServiceEnvironment:
    """The environment of a run on the same claim: <claim>/<run id>, which does not exist yet."""
    claim = environment.run_dir
    return environment.model_copy(update={"run_id": run_id, "run_dir": claim / run_id})


@pytest.mark.parametrize("other", OTHERS)
async def test_a_second_run_on_the_same_claim_begins_at_the_beginning(
    config: RunConfig, environment: ServiceEnvironment, other: str
) -> None:
    first, second = of_run(environment, "first"), of_run(environment, "second")
    await run(config, first)
    before = files(first.run_dir)
    trainer = await run(with_settings(config, **OTHERS[other]), second)
    assert len(trainer.steps) == 6
    assert [row["iteration"] for row in rows(second)] == [1, 2, 3, 4, 5, 6]
    assert files(first.run_dir) == before
    marks = {env.run_id: read_complete(list_complete(env.run_dir)[-1][1]) for env in (first, second)}
    assert {run_id: mark["run_id"] for run_id, mark in marks.items()} == {"first": "first", "second": "second"}


@pytest.mark.parametrize("other", OTHERS)
async def test_in_the_folder_of_the_first_it_is_refused_by_name_and_nothing_is_lost(
    config: RunConfig, environment: ServiceEnvironment, other: str
) -> None:
    await run(config, environment)
    before = files(environment.run_dir)
    second = with_settings(config, **OTHERS[other])
    with pytest.raises(ConfigError, match=r"is the folder of run 't' \(run\.json\), and this is run 'second'"):
        await conduct(second, environment.model_copy(update={"run_id": "second"}), resume=True, stop=asyncio.Event())
    told = {
        "name": r"run\.name: t in the checkpoint, second in the run",
        "seed": r"run\.seed: 0 in the checkpoint, 7 in the run",
        "reward": r"reward\.kind: exact_match in the checkpoint, math_verify in the run",
    }
    with pytest.raises(ConfigError, match=rf"cannot resume from .*/step-00000006: {told[other]}.*or start a new run"):
        await conduct(second, environment, resume=True, stop=asyncio.Event())
    assert files(environment.run_dir) == before
    longer = with_settings(config, run={"iterations": 8}, trainer={"learning_rate": 1e-7})
    await run(longer, environment, policy_version=6)
    assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_the_process_exits_with_the_code_of_a_wrong_configuration(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    await run(config, environment)
    path = write_config(with_settings(config, run={"seed": 7}), tmp_path)
    command = [sys.executable, "-m", "coordinator", "--config", path, "--resume"]
    ended = await asyncio.to_thread(
        subprocess.run, command, env=variables_of(environment), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == EXIT_BAD_CONFIG
    assert "run.seed: 0 in the checkpoint, 7 in the run" in ended.stderr
    assert saved_state(environment)["status"] == "finished"


async def test_a_checkpoint_of_an_older_release_is_accepted_with_one_warning(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    await run(config, environment)
    (environment.run_dir / "run.json").unlink()
    for _, folder in list_complete(environment.run_dir):
        mark = {
            name: value
            for name, value in read_complete(folder).items()
            if name not in ("run_id", "configuration", "digest")
        }
        (folder / "complete.json").unlink()
        mark_complete(folder, **mark)
    caplog.clear()
    await run(with_settings(config, run={"iterations": 8}), environment, policy_version=6)
    assert caplog.text.count("the checkpoint does not say of which run and configuration it is") == 1
    assert read_complete(list_complete(environment.run_dir)[-1][1])["run_id"] == "t"


async def test_where_no_launcher_runs_the_coordinator_keeps_the_configuration_in_the_folder(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    await run(config, environment)
    assert (environment.run_dir / RESOLVED_CONFIG).read_text() == dump_resolved(config)
    assert json.loads((environment.run_dir / "run.json").read_text()) == {"launch_id": "", "run_id": "t"}
    longer = with_settings(config, run={"iterations": 8})
    await run(longer, environment, policy_version=6)
    assert yaml.safe_load((environment.run_dir / RESOLVED_CONFIG).read_text())["run"]["iterations"] == 8
    assert not (environment.run_dir / NEXT_CONFIG).exists()
