"""A run on real engines is scaled from 1 to 4 replicas and back while it trains: nothing is lost, and what it costs."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem_files.run_folder import read_scale
from tests.e2e.conftest import Tandem, rows_of, run_arguments
from tests.kit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]
# Four replicas start beside each other, on two cores.
SCALED_S = 500.0
NEVER = 100_000
CHANGES = {
    "run__iterations": NEVER,
    "run__checkpoint_every": 5,
    "run__evaluate_every": NEVER,
    # Completions of random tokens, so that many are under way whenever a replica is asked to end.
    "grpo__max_new_tokens": 48,
    "grpo__temperature": 10.0,
    "rollout__max_running_requests": 32,
}
ASYNC = {"schedule__kind": "async", "grpo__preset": "decoupled"}


def scale(run_dir: Path, replicas: int) -> tuple[int, str, float]:
    """`tandem scale`: exit code, output, seconds."""
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "launcher", "scale", str(run_dir), f"rollout={replicas}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCALED_S, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begun_s


def timed(run_dir: Path, message: str) -> list[dict[str, Any]]:
    """The coordinator's log lines with this message."""
    lines = (run_dir / "logs" / "coordinator.log").read_text().splitlines()
    found = [json.loads(line) for line in lines if message in line and line.startswith("{")]
    return [line for line in found if line.get("message") == message]


@pytest.mark.runs("tandem scale", "tandem ledger")
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_replicas_come_and_go_and_no_group_is_lost(tandem: Callable[..., Tandem], tmp_path: Path, kind: str) -> None:
    run = tandem(*run_arguments("scaled", **CHANGES, **(ASYNC if kind == "async" else {})))
    run_dir = tmp_path / "runs" / "scaled"
    run.wait_iteration(2)
    code, text, up_s = scale(run_dir, 4)
    assert code == 0, text
    assert "rollout-0, rollout-1, rollout-2, rollout-3 serve" in text
    before = len(rows_of(run_dir))
    until(lambda: len(rows_of(run_dir)) >= before + 3, 240.0, "iterations of four replicas", interval_s=0.2)
    code, text, down_s = scale(run_dir, 1)
    assert code == 0, text
    until(lambda: len(processes(run)) == 1, 60.0, "the end of three replicas", interval_s=0.2)
    before = len(rows_of(run_dir))
    until(lambda: len(rows_of(run_dir)) >= before + 3, 240.0, "iterations of one replica", interval_s=0.2)
    run.process.terminate()
    assert run.wait_end(120.0) == 143
    rows = rows_of(run_dir)
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["retried_calls"] for row in rows if row["retried_calls"]] == []
    assert len(timed(run_dir, "generate call failed")) == 0
    verify = [sys.executable, "-m", "launcher", "ledger", str(run_dir), "--verify"]
    proven = subprocess.run(verify, capture_output=True, text=True, timeout=120, check=False)
    assert proven.returncode == 0, proven.stdout + proven.stderr
    ended = {name: (run_dir / "logs" / f"rollout-{name}.log").read_text() for name in range(4)}
    assert not any("grace period over" in text for text in ended.values())
    scaled = read_scale(run_dir)
    assert scaled is not None
    assert (scaled.replicas, scaled.configured) == (1, 1)
    resumed = sum(row["resumed_tokens"] for row in rows)
    joined = [line for line in run.lines if "joined" in line]
    print(f"\n{kind}: up {up_s:.1f} s, down {down_s:.1f} s, tokens handed over {resumed}, {len(rows)} rows, {joined}")
    print(proven.stdout)


def processes(run: Tandem) -> list[psutil.Process]:
    """The replicas' own processes, without guards and ranks."""
    return [process for process in run.processes() if is_replica(process)]


def is_replica(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:  # it has just ended
        return False
    return {"--name", "rollout_service"} <= set(command) and "--parent" not in command
