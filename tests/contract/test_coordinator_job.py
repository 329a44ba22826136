"""How often a Job tries: failures in a row count, not those of a month; the Job controller is a stand-in, named so."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.app import conduct
from coordinator.retries import MAX_FAILURES
from coordinator.shutdown import Exits
from servicekit.environment import ServiceEnvironment
from servicekit.errors import Internal
from servicekit.lifecycle.exit_codes import EXIT_GIVEN_UP
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import newest_iteration
from tandem_files.leader import FAILURES_FILE
from tests.contract.coordinator_runs import rows, variables_of, with_settings, write_config
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_job import FakeJob
from tests.fakes.fake_trainer import FakeTrainer
from tests.house.repository import REPO
from tests.kit.processes import free_port

pytestmark = pytest.mark.usefixtures("brief_news")


def the_job() -> dict[str, Any]:
    """The coordinator's, as deploy/base has it."""
    found = yaml.safe_load_all((REPO / "deploy" / "base" / "coordinator.yaml").read_text())
    (job,) = [each for each in found if each["kind"] == "Job"]
    return dict(job)


def exits_of(job: dict[str, Any]) -> Exits:
    """As the container's arguments say."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]

    def code(flag: str) -> int:
        return int(arguments[arguments.index(flag) + 1])

    return Exits(interrupted=code("--interrupted-exit"), retry=code("--retry-exit"))


async def attempts(
    config: RunConfig, environment: ServiceEnvironment, fails_at: int, most: int
) -> tuple[FakeJob, list[int]]:
    """Run the Job to its end; in each attempt the trainer's `fails_at`-th step fails. Returns: Job, exit codes."""
    manifest = the_job()
    job, codes = FakeJob(manifest), list[int]()

    async def fail(step: int) -> None:
        if step == fails_at:
            raise Internal("cuda error")

    while len(codes) < most:
        own = environment
        trainer = FakeTrainer(policy_version=newest_iteration(own.run_dir) or 0, before_step=fail)
        async with announced_fleet(own.redis_url, own.run_id, trainer):
            stop = asyncio.Event()
            codes.append(await conduct(config, own, resume=True, stop=stop, exits=exits_of(manifest)))
        if not job.pod_ended(codes[-1]):
            break
    return job, codes


async def test_failures_of_a_run_that_gets_on_do_not_end_it(config: RunConfig, environment: ServiceEnvironment) -> None:
    """More of them than backoffLimit, each behind a new checkpoint."""
    config = with_settings(config, run={"iterations": 10, "checkpoint_every": 1, "evaluate_every": 100})
    job, codes = await attempts(config, environment, fails_at=2, most=20)
    assert (job.ended, job.failed) == ("Complete", 0)
    assert codes == [75] * 9 + [0]
    assert len(codes) - 1 > job._limit
    assert [row["iteration"] for row in rows(environment)] == list(range(1, 11))


@pytest.mark.parametrize("fails_at", [1, 3], ids=["before its first iteration", "always behind the same iteration"])
async def test_failures_in_a_row_end_it(config: RunConfig, environment: ServiceEnvironment, fails_at: int) -> None:
    """Also where each attempt does iterations, of which none is saved: the next one does them again."""
    config = with_settings(config, run={"iterations": 10, "checkpoint_every": 5, "evaluate_every": 100})
    job, codes = await attempts(config, environment, fails_at=fails_at, most=20)
    assert job.ended == "PodFailurePolicy"
    assert codes == [75] * (MAX_FAILURES - 1) + [4]
    # A person has acted, and applies the Job again: it has all of its attempts.
    job, codes = await attempts(config, environment, fails_at=fails_at, most=2)
    assert (job.ended, codes) == ("", [75, 75])


async def test_without_a_job_failures_are_not_counted(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    async def fail(_: int) -> None:
        raise Internal("cuda error")

    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=fail)):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert not (environment.run_dir / "failures.json").exists()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"values": [143, 75]}, "ordered"),
        ({"values": [0, 75]}, "must not be 0"),
        ({"values": []}, "not empty"),
        ({"containerName": "main"}, "no such container"),
    ],
)
def test_the_stand_in_refuses_what_validation_refuses(change: dict[str, Any], refused: str) -> None:
    job = the_job()
    rule = next(rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule)
    rule["onExitCodes"] |= change
    with pytest.raises(ValueError, match=refused):
        FakeJob(job)


def test_a_job_with_a_standby_is_complete_when_both_pods_have_ended() -> None:
    standby = the_job()
    standby["spec"]["parallelism"] = 2
    job = FakeJob(standby)
    # A leader that was killed, one that a drain has evicted, a standby that does not fit its leader.
    assert all(job.pod_ended(code) for code in (137, 143, 75))
    assert (job.failed, job.active, job.ended) == (1, 2, "")
    assert not job.pod_ended(0)
    assert (job.active, job.ended) == (1, "")
    assert not job.pod_ended(0)
    assert (job.active, job.ended) == (0, "Complete")


def test_the_stand_in_counts_as_a_job_does() -> None:
    job = FakeJob(the_job())
    assert job.pod_ended(143)
    assert job.pod_ended(137, conditions=["DisruptionTarget"])
    assert job.failed == 0
    assert [job.pod_ended(1) for _ in range(7)] == [True] * 6 + [False]  # of its whole life
    assert job.ended == "BackoffLimitExceeded"
    assert not FakeJob(the_job()).pod_ended(2)
    assert not FakeJob(the_job()).pod_ended(0)


@pytest.mark.parametrize("before", [0, MAX_FAILURES - 1])
def test_failures_before_the_run_begins_count_too(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path, before: int
) -> None:
    """Redis is not there: the run has not begun, and has no coordinator that could count."""
    noted = environment.run_dir / FAILURES_FILE
    noted.write_text(json.dumps({"iteration": 0, "failures": before}))
    variables = {**variables_of(environment), "REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"}
    command = [sys.executable, "-m", "coordinator", "--config", write_config(config, tmp_path), "--resume"]
    ended = subprocess.run(
        [*command, "--retry-exit", "75"],
        env={**os.environ, **variables, "TANDEM_REDIS_WAIT_S": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == (75 if before == 0 else EXIT_GIVEN_UP), ended.stderr
    assert noted.exists() == (before == 0)
