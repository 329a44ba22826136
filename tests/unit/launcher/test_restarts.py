"""Which deaths a run outlives: budgets of restarts in a row, back-off, replicas that are left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.run.restarts import LIVED_WELL_S, Restarts
from launcher.run.supervisor import ProcessExit, ProcessSpec
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.run_config import NEXT_CONFIG, adopt_next

NAMES = ("trainer-0", "trainer-1", "rollout-0", "rollout-1", "rollout-2", "coordinator")
KILLED = 137


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def restarts_of(run_dir: Path, clock: Clock, *, has_begun: bool = True, **run: Any) -> Restarts:
    (run_dir / "metrics.jsonl").write_text(json.dumps({"iteration": 1}) + "\n" if has_begun else "")
    config = RunConfig.model_validate(
        {
            "run": run,
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "rollout": {"replicas": 3, "min_replicas": 2},
        }
    )
    return Restarts(run_dir, config, NAMES, clock)


def death(tmp_path: Path, name: str, code: int = KILLED) -> ProcessExit:
    return ProcessExit(name=name, code=code, log=tmp_path / "none.log")


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("rollout-1", {"rollout-1"}),
        ("trainer-1", {"trainer-0", "trainer-1"}),
        ("coordinator", {"coordinator"}),
        # it says that the trainer does not answer: a frozen one has died, whatever its processes do
        ("coordinator:3", {"trainer-0", "trainer-1", "coordinator"}),
    ],
)
def test_who_starts_again(tmp_path: Path, clock: Clock, name: str, again: set[str]) -> None:
    name, _, code = name.partition(":")
    restart = restarts_of(tmp_path, clock).after(death(tmp_path, name, int(code or KILLED)))
    assert restart is not None
    assert restart.names == again


@pytest.mark.parametrize(
    ("name", "code"),
    [("redis", KILLED), ("coordinator", 1), ("coordinator", 2), ("trainer-0", 2)],
    ids=lambda value: str(value),
)
def test_what_ends_a_run(tmp_path: Path, clock: Clock, name: str, code: int) -> None:
    assert restarts_of(tmp_path, clock).after(death(tmp_path, name, code)) is None


def test_a_replica_that_a_configuration_makes_fail_is_left_out_at_once(tmp_path: Path, clock: Clock) -> None:
    restarts = restarts_of(tmp_path, clock)
    restart = restarts.after(death(tmp_path, "rollout-1", 2))
    assert restart is not None
    assert restart.names == frozenset()
    assert "a restart cannot help: continuing with rollout-0, rollout-2" in restart.text
    assert restarts.after(death(tmp_path, "rollout-2", 2)) is None  # fewer than rollout.min_replicas would be left


@pytest.mark.parametrize("name", ["rollout-0", "trainer-0", "coordinator"])
def test_a_run_that_has_not_begun_is_not_saved(tmp_path: Path, clock: Clock, name: str) -> None:
    assert restarts_of(tmp_path, clock, has_begun=False).after(death(tmp_path, name)) is None


@pytest.mark.parametrize("name", ["rollout-0", "trainer-0", "coordinator"])
def test_a_resumed_run_has_not_begun_before_an_iteration_of_its_own(tmp_path: Path, clock: Clock, name: str) -> None:
    restarts = restarts_of(tmp_path, clock)
    (tmp_path / NEXT_CONFIG).write_text("of the resume")
    assert restarts.after(death(tmp_path, name)) is None
    adopt_next(tmp_path)
    assert restarts.after(death(tmp_path, name)) is not None


def test_a_run_that_has_begun_stays_so_when_it_begins_anew(tmp_path: Path, clock: Clock) -> None:
    restarts = restarts_of(tmp_path, clock)
    assert restarts.after(death(tmp_path, "trainer-0")) is not None
    (tmp_path / "metrics.jsonl").write_text("")
    assert restarts.after(death(tmp_path, "trainer-0")) is not None


def test_the_text_names_the_dead_the_checkpoint_and_the_budget(tmp_path: Path, clock: Clock) -> None:
    step = step_folder(tmp_path, 7)
    step.mkdir(parents=True)
    mark_complete(step, iteration=7, policy_version=7, model="m", model_fingerprint="f")
    restart = restarts_of(tmp_path, clock).after(death(tmp_path, "coordinator"))
    assert restart is not None
    assert restart.text == (
        "coordinator was ended by SIGKILL; it takes over the services and continues where it was, or from the "
        "checkpoint of iteration 7 (restart 1 of 2 in a row, run.coordinator_restarts)"
    )


@pytest.mark.parametrize("name", ["coordinator", "trainer-0", "rollout-0"])
def test_restarts_in_a_row_wait_longer_and_longer_until_there_is_progress(
    tmp_path: Path, clock: Clock, name: str
) -> None:
    budgets: dict[str, Any] = dict.fromkeys(("coordinator_restarts", "trainer_restarts", "replica_restarts"), 9)
    restarts = restarts_of(tmp_path, clock, **budgets)
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"iteration": 3}))
    delays_s = []
    for _ in range(9):
        restart = restarts.after(death(tmp_path, name))
        assert restart is not None
        delays_s.append(restart.delay_s)
        clock.now_s += LIVED_WELL_S / 2
    assert delays_s == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    last = restarts.after(death(tmp_path, name))
    assert last is None or last.names == frozenset()  # a replica is left out
    clock.now_s += LIVED_WELL_S
    state.write_text(json.dumps({"iteration": 4}))
    restart = restarts.after(death(tmp_path, name))
    assert restart is not None
    assert (restart.names >= {name}, restart.delay_s) == (True, 0)


@pytest.mark.parametrize("name", ["coordinator", "trainer-0"])
def test_iterations_that_are_done_again_are_no_progress(tmp_path: Path, clock: Clock, name: str) -> None:
    restarts = restarts_of(tmp_path, clock)
    found = []
    for iteration in (7, 5, 7, 8, 8, 8, 9):
        (tmp_path / "state.json").write_text(json.dumps({"iteration": iteration}))
        found.append(restarts.after(death(tmp_path, name)) is not None)
    assert found == [True, True, False, True, True, False, True]


def test_each_replica_has_its_own_budget(tmp_path: Path, clock: Clock) -> None:
    restarts = restarts_of(tmp_path, clock, replica_restarts=1)
    for name in ("rollout-0", "rollout-1"):
        restart = restarts.after(death(tmp_path, name))
        assert restart is not None
        assert restart.names == {name}


def test_a_replica_beyond_its_budget_is_left_out_while_enough_others_are_there(tmp_path: Path, clock: Clock) -> None:
    restarts = restarts_of(tmp_path, clock, replica_restarts=0)
    restart = restarts.after(death(tmp_path, "rollout-1"))
    assert restart is not None
    assert restart.names == frozenset()
    assert restart.text.endswith("continuing with rollout-0, rollout-2")
    assert restarts.left_out == {"rollout-1"}
    # A second one would leave fewer than rollout.min_replicas.
    assert restarts.after(death(tmp_path, "rollout-0")) is None


def test_another_coordinator_begins_with_all_replicas(tmp_path: Path, clock: Clock) -> None:
    restarts = restarts_of(tmp_path, clock, replica_restarts=0)
    restarts.after(death(tmp_path, "rollout-1"))
    restart = restarts.after(death(tmp_path, "coordinator"))
    assert restart is not None
    assert restart.names == {"coordinator", "rollout-1"}
    assert restarts.left_out == set()


def test_a_restart_starts_the_planned_processes_after_its_delay(tmp_path: Path, clock: Clock) -> None:
    planned = [ProcessSpec(name=name, command=["x"], log=tmp_path / name) for name in NAMES]
    restarts = restarts_of(tmp_path, clock)
    restarts.after(death(tmp_path, "rollout-0"))
    restart = restarts.after(death(tmp_path, "rollout-0"))
    assert restart is not None
    assert [(spec.name, spec.delay_s) for spec in restart.specs(planned)] == [("rollout-0", 1.0)]
