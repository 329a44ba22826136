"""What tests of the coordinator's runs share: settings, and a look at what a run leaves."""

import asyncio
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig
from tandem_files.ledger.account import Account
from tandem_files.ledger.reading import read_ledger
from tandem_files.run_folder import note_launch
from tests.fakes.fake_fleet import FakeFleet
from tests.fakes.fake_trainer import FakeTrainer


def with_settings(config: RunConfig, **sections: Any) -> RunConfig:
    """Add settings to sections; a list (of rewards) replaces the one before."""
    merged = config.model_dump()
    for section, settings in sections.items():
        merged[section] = merged[section] | settings if isinstance(merged[section], dict) else settings
    return RunConfig.model_validate(merged)


def launched_again(environment: ServiceEnvironment, launch_id: str) -> ServiceEnvironment:
    """The environment of another launch in the run's folder, as `tandem run --resume` makes it."""
    note_launch(environment.run_dir, launch_id)
    return environment.model_copy(update={"run_id": launch_id})


def variables_of(environment: ServiceEnvironment) -> dict[str, str]:
    """The environment of a process of the run."""
    return {
        "REDIS_URL": environment.redis_url,
        "TANDEM_RUN_ID": environment.run_id,
        "TANDEM_RUN_DIR": str(environment.run_dir),
    }


def write_config(config: RunConfig, folder: Path) -> str:
    """The settings as a file, for a process. Returns: its path."""
    path = folder / "config.yaml"
    path.write_text(dump_resolved(config))
    return str(path)


def rows(environment: ServiceEnvironment) -> list[dict[str, Any]]:
    """The finished rows of iterations: a coordinator that runs may be in the middle of its next one."""
    return [row for row in rows_with_baseline(environment) if row["iteration"]]


def rows_with_baseline(environment: ServiceEnvironment) -> list[dict[str, Any]]:
    """The finished rows, that of the evaluation before the training too."""
    lines = (environment.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saved_state(environment: ServiceEnvironment) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((environment.run_dir / "state.json").read_text())
    return state


async def attempt(config: RunConfig, environment: ServiceEnvironment, *, resume: bool = True) -> int:
    return await conduct(config, environment, resume=resume, stop=asyncio.Event())


def asked(fleet: FakeFleet) -> dict[int, set[int]]:
    """The policy versions that were asked for, by iteration."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for rollout in fleet.rollout_services:
        for request in rollout.requests:
            for group in request.groups:
                if group.group_id.startswith("i"):
                    found[int(group.group_id[1:].partition(".")[0])].add(request.min_policy_version)
    return dict(found)


def groups_asked(fleet: FakeFleet) -> Counter[str]:
    requests = [request for rollout in fleet.rollout_services for request in rollout.requests]
    return Counter(group.group_id for request in requests for group in request.groups if group.group_id.startswith("i"))


def trained(*trainers: FakeTrainer) -> Counter[str]:
    return Counter(
        sample for trainer in trainers for step in trainer.steps for chunk in step.chunks for sample in chunk.sample_ids
    )


def account_of(environment: ServiceEnvironment) -> Account:
    ledger = read_ledger(environment.run_dir, "t")
    assert ledger.problems == []
    return ledger.account


async def run_until_stopped(
    config: RunConfig, environment: ServiceEnvironment, fleet: FakeFleet, *, step: int, holds: bool = False
) -> None:
    """Begin a run, and ask it to end during a train step; holds: the replicas answer nothing from then on."""
    stop, before_step = asyncio.Event(), fleet.trainer_service.before_step

    async def ask(number: int) -> None:
        if before_step is not None:
            await before_step(number)
        if number == step:
            for rollout in fleet.rollout_services if holds else ():
                rollout.hold.clear()
            stop.set()

    fleet.trainer_service.before_step = ask
    async with asyncio.timeout(20.0):
        assert await conduct(config, environment, resume=False, stop=stop) == 0
    fleet.trainer_service.before_step = None
    for rollout in fleet.rollout_services:
        rollout.hold.set()
