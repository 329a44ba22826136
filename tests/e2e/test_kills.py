"""kill -9 at random moments: the curve of the run that resumes is that of one that nothing has happened to, bit by bit.

Completions are drawn by seeds; the trainer computes the log-probs of its loss itself. Those of the engine are rounded
otherwise in other batches, by 1e-6, which changes a compared value only where a draw of two tokens is closer than that.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from tandem_config.schema import RunConfig
from tandem_files.checkpoints import list_complete
from tandem_files.ledger.account import Account
from tandem_files.ledger.reading import read_ledger
from tandem_files.run_config import RESOLVED_CONFIG
from tests.e2e.conftest import Tandem, pid_of, rows_of, run_arguments, summary_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3000)]

KILLS, ITERATIONS, SEED = 10, 40, 11
COORDINATOR_KILLS, TRAINER_KILLS = 8, 5
MOST_BETWEEN = 2  # iterations
VICTIMS = ("trainer_service", "rollout_service", "coordinator")
CURVE = ("loss", "grad_norm", "reward_mean", "entropy", "response_length_mean")
SETTINGS = {
    "run__iterations": ITERATIONS,
    "run__checkpoint_every": 2,
    "run__evaluate_every": ITERATIONS,
    "run__checkpoint_async": True,
    "run__trainer_restarts": KILLS,
    "run__replica_restarts": KILLS,
    "run__coordinator_restarts": KILLS,
    # a run that is repeated samples the same
    "rollout__seeded": True,
}


def curves(folder: Path) -> dict[str, list[float]]:
    rows = rows_of(folder)
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    return {name: [row[name] for row in rows] for name in CURVE}


def proven(folder: Path) -> Account:
    """The account of a run's samples, in which nothing is damaged or untrue, nor under way."""
    ledger = read_ledger(folder)
    assert ledger.problems == []
    assert ledger.account.under_way == 0
    return ledger.account


def kill(run: Tandem, folder: Path, chance: random.Random, victims: Sequence[str] = VICTIMS) -> str:
    """Kill a service at a random moment of one of the next iterations; wait while it is being started again."""
    begins = len(rows_of(folder)) + chance.randint(1, MOST_BETWEEN)
    deadline_s = time.monotonic() + 300
    while len(rows_of(folder)) < begins and run.process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    # Not in seconds, and not of an iteration that waited for a service to start again: a fast machine would be through
    # with all iterations before the last kill.
    time.sleep(chance.random() * min(row["iteration_s"] for row in rows_of(folder)))
    victim = chance.choice(victims)
    while run.process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(pid_of(run, victim), signal.SIGKILL)
            return victim
        time.sleep(0.2)
    raise AssertionError(f"no {victim} to kill in iteration {begins + 1}; output:\n" + run.output())


def test_ten_kills_do_not_bend_the_curve(tandem: Callable[..., Tandem], tmp_path: Path) -> None:
    calm = tandem(*run_arguments("calm", **SETTINGS))
    assert calm.wait_end(900) == 0, calm.output()
    chance, struck = random.Random(SEED), tandem(*run_arguments("struck", **SETTINGS))
    struck.wait_iteration(1)
    killed = [kill(struck, tmp_path / "runs" / "struck", chance) for _ in range(KILLS)]
    assert struck.wait_end(900) == 0, f"killed {killed}\n{struck.output()}"
    expected, got = (curves(tmp_path / "runs" / name) for name in ("calm", "struck"))
    for name in CURVE:
        assert got[name] == expected[name], f"{name}; killed {killed}"
    # A kill while one is being written leaves an unfinished one, and the run says so; no finished one is damaged.
    damaged = summary_of(tmp_path / "runs" / "struck")["damaged_checkpoints"]
    assert [each for each in damaged if "was not finished" not in each] == []
    assert list_complete(tmp_path / "runs" / "struck")[-1][0] == ITERATIONS
    proven(tmp_path / "runs" / "struck")
    struck.assert_nothing_left()


@pytest.mark.parametrize("schedule", ["sync", "one_step_off", "async"])
@pytest.mark.parametrize("victims", [("coordinator",), ("trainer_service",), ("trainer_service", "coordinator")])
def test_kills_cost_no_iteration_and_no_finished_group(
    tandem: Callable[..., Tandem], tmp_path: Path, schedule: str, victims: Sequence[str]
) -> None:
    folder, chance = tmp_path / "runs" / "struck", random.Random(SEED)
    kills = COORDINATOR_KILLS if victims == ("coordinator",) else TRAINER_KILLS
    iterations = 2 * kills + 5
    settings = {
        "run__iterations": iterations,
        "run__coordinator_restarts": kills,
        "run__trainer_restarts": kills,
        # As they are by default.
        "run__checkpoint_every": 10,
        "run__evaluate_every": 5,
        "rollout__replicas": 2,
        "schedule__kind": schedule,
        "grpo__preset": "grpo" if schedule == "sync" else "decoupled",
    }
    run = tandem(*run_arguments("struck", **settings))
    run.wait_iteration(1)
    for _ in range(kills):
        kill(run, folder, chance, victims)
    assert run.wait_end(900) == 0, run.output()
    assert [row["iteration"] for row in rows_of(folder)] == list(range(1, iterations + 1))
    account = proven(folder)
    # Each sample was begun once: nothing was undone, dropped or generated twice.
    config = RunConfig.model_validate(yaml.safe_load((folder / RESOLVED_CONFIG).read_text()))
    size = config.grpo.prompts_per_iteration * config.grpo.group_size
    assert account.counts["begun"] == iterations * size
    assert account.total("dropped") == 0
    assert "restoring the checkpoint under a new version" not in (folder / "logs" / "coordinator.log").read_text()
    run.assert_nothing_left()
