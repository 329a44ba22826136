"""The whole system from the command line: it trains, it stops when told to, it fails clearly, it goes on."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem_files.ledger.reading import read_ledger
from tests.e2e.conftest import Tandem, pid_of, rows_of, run_arguments, summary_of
from tests.kit.folders import fill, small_disk

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

Start = Callable[..., Tandem]

# What a row says of its train step. The parts are those that every step has, whatever the configuration.
SPEED = (
    *("train_tokens_per_s", "model_flops_utilization", "train_peak_memory_bytes", "packing_efficiency"),
    *("prompt_sharing", "train_receive_s", "train_pack_s", "train_old_logprobs_s", "train_forward_backward_s"),
    "train_optimizer_s",
)
# With a KL term in the loss, and with trainer.offload.
SOMETIMES = {"train_reference_s", "train_onload_s", "train_offload_s"}


def weights(folder: Path) -> bytes:
    """The one file of weights of a Hugging Face folder."""
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_replicas_generate_through_weight_syncs_with_the_asynchronous_schedule(tandem: Start, tmp_path: Path) -> None:
    settings = {"schedule__kind": "async", "grpo__preset": "decoupled", "run__iterations": 5, "run__evaluate_every": 5}
    run = tandem(*run_arguments("ahead", **settings))
    assert run.wait_end(240) == 0, run.output()
    run.assert_nothing_left()
    folder = tmp_path / "runs" / "ahead"
    rows, account = rows_of(folder), read_ledger(folder).account
    ages = [row["staleness_max"] for row in rows]
    assert ages[0] == 0
    assert 1 <= max(ages) <= 3
    assert (account.under_way, account.counts["begun"]) == (0, account.total("trained"))
    assert sum(row["trained_samples"] for row in rows) == account.total("trained") == 5 * 16 * 8
    # Trainer and engine are compared where samples are of the policy itself, and else in each 20th iteration.
    assert rows[0]["logprob_abs_diff_max"] <= 1e-4
    assert all((row["logprob_abs_diff_max"] is None) == (row["staleness_max"] > 0) for row in rows)


@pytest.mark.runs("tandem run", "tandem export")
@pytest.mark.timeout(500)
def test_a_run_goes_from_start_to_end_and_can_be_continued(tandem: Start, tmp_path: Path) -> None:
    run = tandem(*run_arguments(run__export_every=1))
    assert run.wait_end(240) == 0, run.output()
    run.assert_nothing_left()
    folder = tmp_path / "runs" / "small"
    assert run.lines[-1] == "finished; results are in runs/small"
    for name in ("config.resolved.yaml", "metrics.jsonl", "summary.json", "reward.png", "hf/config.json"):
        assert (folder / name).is_file(), name
    assert {log.name for log in (folder / "logs").iterdir()} >= {
        "redis.log",
        "trainer-0.log",
        "rollout-0.log",
        "coordinator.log",
    }
    summary = summary_of(folder)
    assert [row["iteration"] for row in rows_of(folder)] == [1, 2]
    assert [(row["iteration"], name) for row in rows_of(folder) for name in SPEED if not row.get(name)] == []
    assert all(row.keys() >= SOMETIMES for row in rows_of(folder))
    assert summary["iterations"] == 2
    assert summary["weight_sync"]["redundancy"] == 1.0
    assert summary["logprob_abs_diff_max"] <= 1e-4
    assert "\x1b" not in "\n".join(run.lines)

    finished = tandem("run", "--resume", "runs/small")
    assert finished.wait_end(60) == 2, finished.output()
    assert f"tandem export {folder} --out" in " ".join(finished.output().split())
    for number, kept in {"2": folder / "hf", "1": folder / "exports" / "iteration-000001"}.items():
        export = tandem("export", "runs/small", "--checkpoint", number, "--out", f"at-{number}")
        assert export.wait_end(60) == 0, export.output()
        assert weights(tmp_path / f"at-{number}") == weights(kept)
    assert weights(tmp_path / "at-1") != weights(tmp_path / "at-2")

    before = (folder / "config.resolved.yaml").read_text()
    other = tandem("run", "--resume", "runs/small", "--set", "run.iterations=3", "--set", "model.dtype=bfloat16")
    assert other.wait_end(60) == 2, other.output()
    assert "model.dtype: float32 in the checkpoint, bfloat16 in the run" in " ".join(other.output().split())
    assert (folder / "config.resolved.yaml").read_text() == before

    layout = ("--set", "trainer.tensor_parallel=2")  # a checkpoint is read at any
    more = tandem("run", "--resume", "runs/small", "--set", "run.iterations=3", *layout)
    assert more.wait_end(240) == 0, more.output()
    assert [row["iteration"] for row in rows_of(folder)] == [1, 2, 3]
    assert summary_of(folder)["policy_version"] > summary["policy_version"]
    assert "iterations: 3" in (folder / "config.resolved.yaml").read_text()


@pytest.mark.runs("tandem status", "tandem top")
def test_ctrl_c_in_the_middle_of_a_run_leaves_nothing(tandem: Start, tmp_path: Path) -> None:
    run = tandem(*run_arguments(run__iterations=1000, run__checkpoint_every=1000))
    run.wait_iteration(1)
    status = tandem("status")
    assert status.wait_end() == 0
    assert any(line.split() == ["state", "running"] for line in status.lines), status.output()
    top = tandem("top", "--once")
    assert top.wait_end() == 0, top.output()
    assert any(line.split()[:2] == ["rollout-0", "serving"] for line in top.lines), top.output()
    run.process.send_signal(signal.SIGINT)
    assert run.wait_end() == 130, run.output()
    assert run.lines[-1].startswith("stopped by Ctrl-C after iteration "), run.output()
    # Nothing that was finished is lost, although no checkpoint was due.
    done = rows_of(tmp_path / "runs" / "small")[-1]["iteration"]
    assert run.lines[-1].endswith(f"; resume from iteration {done} with: tandem run --resume runs/small"), run.output()
    run.assert_nothing_left()


def test_sigterm_while_engines_start_leaves_nothing(tandem: Start) -> None:
    run = tandem(*run_arguments())
    run.wait_up("coordinator")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait_end() == 143, run.output()
    expected = "stopped by SIGTERM before its first iteration ended; there is no checkpoint to resume from yet"
    assert run.lines[-1] == expected, run.output()
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_failing_service_ends_the_run_and_is_named(tandem: Start) -> None:
    run = tandem(*run_arguments(run__iterations=1000, run__replica_restarts=0))
    run.wait_iteration(1)
    os.kill(pid_of(run, "rollout_service"), signal.SIGKILL)
    assert run.wait_end() == 1, run.output()
    assert run.lines[-1].startswith("failed: rollout-0 was ended by SIGKILL"), run.output()
    assert "tandem run --resume runs/small" in run.lines[-1]
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trainer_that_dies_does_its_steps_again_to_the_bit(tandem: Start, tmp_path: Path) -> None:
    settings = {"run__iterations": 9, "run__checkpoint_every": 4, "rollout__seeded": True}
    calm = tandem(*run_arguments("calm", **settings))
    assert calm.wait_end(240) == 0, calm.output()
    run = tandem(*run_arguments("struck", **settings))
    run.wait_iteration(6)
    others = [pid_of(run, "rollout_service"), pid_of(run, "coordinator")]
    os.kill(pid_of(run, "trainer_service"), signal.SIGKILL)
    run.wait_line(lambda line: "steps since its checkpoint were done again" in line, "its return")
    assert [pid_of(run, "rollout_service"), pid_of(run, "coordinator")] == others
    assert run.wait_end(240) == 0, run.output()
    output = " ".join(run.output().split())
    assert "resumes from the checkpoint of iteration 4 (restart 1 of 2" in output
    folder = tmp_path / "runs" / "struck"
    rows, account = rows_of(folder), read_ledger(folder).account
    assert [row["policy_version"] for row in rows] == list(range(1, 10))
    assert (account.problems, account.counts["returned"], account.total("dropped")) == ([], 0, 0)
    assert account.total("trained") == account.counts["begun"]
    assert summary_of(folder)["logprob_abs_diff_max"] <= 1e-4
    assert weights(folder / "hf") == weights(tmp_path / "runs" / "calm" / "hf")
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_run_survives_the_death_of_its_only_replica_and_of_its_coordinator(tandem: Start, tmp_path: Path) -> None:
    """In the middle of an iteration, one after the other; nobody else is started again."""
    run = tandem(*run_arguments(run__iterations=16, run__checkpoint_every=4))
    run.wait_iteration(3)
    trainer = pid_of(run, "trainer_service")
    os.kill(pid_of(run, "rollout_service"), signal.SIGKILL)
    run.wait_line(lambda line: "it starts again and is seeded (restart 1 of 4" in line, "the replica's restart")
    run.wait_iteration(6)
    rollout = pid_of(run, "rollout_service")
    os.kill(pid_of(run, "coordinator"), signal.SIGKILL)
    restarted = (
        "takes over the services and continues where it was, or from the checkpoint of iteration 4 (restart 1 of 2"
    )
    run.wait_line(lambda line: restarted in line, "its restart")
    run.wait_iteration(12)
    assert (pid_of(run, "trainer_service"), pid_of(run, "rollout_service")) == (trainer, rollout)
    assert run.wait_end(240) == 0, run.output()
    folder = tmp_path / "runs" / "small"
    rows = rows_of(folder)
    assert [row["iteration"] for row in rows] == list(range(1, 17))
    # Nothing is trained again: the trainer has outlived both.
    assert [row["policy_version"] for row in rows] == list(range(1, 17))
    summary = summary_of(folder)
    assert summary["iterations"] == 16
    assert summary["logprob_abs_diff_max"] <= 1e-4
    run.assert_nothing_left()


@pytest.mark.slow
def test_two_runs_side_by_side_and_a_killed_launcher(tandem: Start, tmp_path: Path) -> None:
    """The second takes the next free name; killing its launcher ends its services and not the first run's."""
    first = tandem(*run_arguments())
    first.wait_up("coordinator")
    second = tandem(*run_arguments())
    second.wait_up("coordinator")
    assert (tmp_path / "runs" / "small-2" / "config.resolved.yaml").is_file()
    refused = tandem("run", "--resume", "runs/small", "--set", "run.iterations=9")
    assert refused.wait_end() == 2
    assert any("is being run by process" in line for line in refused.lines)
    second.process.kill()
    second.assert_nothing_left()
    assert first.wait_end(240) == 0, first.output()
    first.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_frozen_trainer_is_started_again(tandem: Start, tmp_path: Path) -> None:
    """With the settings as shipped. Its processes are there, so only silence tells."""
    run = tandem(*run_arguments(run__iterations=9, run__checkpoint_every=4))
    run.wait_iteration(6)
    frozen = pid_of(run, "trainer_service")
    os.kill(frozen, signal.SIGSTOP)
    restarted = run.wait_line(lambda line: "the trainer resumes from the checkpoint" in line, "its restart", 300)
    assert "coordinator exited with code 3" in restarted
    assert "the trainer does not answer" in restarted
    assert run.wait_end(300) == 0, run.output()
    assert not Path(f"/proc/{frozen}").exists()
    assert [row["iteration"] for row in rows_of(tmp_path / "runs" / "small")] == list(range(1, 10))
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("module", "name", "silent_s"), [("coordinator", "coordinator", 60), ("rollout_service", "rollout-0", 120)]
)
def test_a_frozen_service_is_killed_and_started_again(
    tandem: Start, tmp_path: Path, module: str, name: str, silent_s: int
) -> None:
    """With the settings as shipped: as the liveness probes of a cluster do."""
    run = tandem(*run_arguments(run__iterations=9, run__checkpoint_every=4))
    run.wait_iteration(6)
    frozen = pid_of(run, module)
    os.kill(frozen, signal.SIGSTOP)
    begun_s = time.monotonic()
    run.wait_line(lambda line: f"{name} has not answered for {silent_s} s: frozen, and killed" in line, "its end", 300)
    print(f"{name}: killed {time.monotonic() - begun_s:.0f} s after it froze")
    run.wait_line(lambda line: f"{name} was ended by SIGKILL" in line, "its restart", 60)
    assert run.wait_end(300) == 0, run.output()
    assert not Path(f"/proc/{frozen}").exists()
    assert [row["iteration"] for row in rows_of(tmp_path / "runs" / "small")] == list(range(1, 10))
    run.assert_nothing_left()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Room for some checkpoints of the demo's model."""
    with small_disk(tmp_path / "runs", "60m") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_is_named_with_the_command_that_goes_on(tandem: Start, disk: Path) -> None:
    settings: dict[str, Any] = {"run__checkpoint_every": 4, "run__evaluate_every": 1000, "run__full_disk_timeout_s": 2}
    run = tandem(*run_arguments(run__iterations=1000, **settings))
    run.wait_iteration(5)
    fill(disk)
    assert run.wait_end(120) == 1, run.output()
    last = run.lines[-1]
    assert last.startswith("failed: coordinator exited with code 1: "), run.output()
    assert "No space left on device" in last
    assert str(disk / "small") in last
    assert last.endswith("with: tandem run --resume runs/small"), last
    folder = disk / "small"
    state = json.loads((folder / "state.json").read_text())
    assert state["status"] == "failed"
    assert "No space left on device" in state["error"]
    done = len(rows_of(folder))
    assert [row["iteration"] for row in rows_of(folder)] == list(range(1, done + 1))
    status = tandem("status", "runs/small")
    assert status.wait_end() == 0
    assert any("failed: " in line and "No space left on device" in line for line in status.lines), status.lines

    (disk / "filler").unlink()
    again = tandem("run", "--resume", "runs/small", "--set", f"run.iterations={done + 2}")
    assert again.wait_end(300) == 0, again.output()
    assert [row["iteration"] for row in rows_of(folder)] == list(range(1, done + 3))
