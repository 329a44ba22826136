"""Run 100,000 iterations of 64 samples with fakes as services, and say what grows.

    python -m tools.week [--iterations 100000] [--samples 64] [--schedule sync] [--out FOLDER]

The coordinator is the real one, in a process of its own, with its ledger, rows, checkpoints, evaluations, samples and
page. At the end `tandem ledger --verify` must prove that each sample was trained once. Exit code: 0; 1: something
grows, or the run or the proof failed, and the report says what.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from servicekit.environment import ServiceEnvironment
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig
from tests.kit.folders import write_data, write_small_model
from tests.kit.redis import RedisProcess
from tools.week.observed import Look, Observer, problems, table

RUN_ID = "week"
GROUP_SIZE = 8
_LOOK_S = 0.5
# No iteration for so long: the run hangs.
_HANG_S = 120.0
# Seconds and bytes within which the proof comes, by the iteration: a run of 100,000 has a quarter of an hour.
PROOF_S = 900.0


@dataclass(kw_only=True)
class Week:
    """What came of a run."""

    iterations: int
    seconds: float = 0.0
    looks: list[Look] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    proof_s: float = 0.0
    proof: str = ""
    end_s: float = 0.0

    def report(self) -> str:
        """The report, in Markdown."""
        said = [f"* WRONG: {text}" for text in self.wrong] or ["* nothing grows"]
        head = f"# {self.iterations:,} iterations in {self.seconds:,.0f} s; the run's end took {self.end_s:.1f} s"
        proof = f"`tandem ledger --verify` took {self.proof_s:.1f} s: {self.proof}"
        return "\n\n".join([head, "\n".join(said), proof, table(self.looks)]) + "\n"


def config_of(folder: Path, iterations: int, samples: int, schedule: str) -> RunConfig:
    """The settings of a run: those of a user, but for its size."""
    problems_ = [(a, b) for a in range(10, 100) for b in range(10, 30)]
    return RunConfig.model_validate(
        {
            "run": {"name": RUN_ID, "iterations": iterations, "evaluate_every": 100, "startup_timeout_s": 60},
            "model": {"path": write_small_model(folder / "model")},
            "data": {
                "train": write_data(folder / "train.jsonl", problems_[20:]),
                "heldout": write_data(folder / "heldout.jsonl", problems_[:20]),
            },
            "grpo": {
                "prompts_per_iteration": max(1, samples // GROUP_SIZE),
                "group_size": GROUP_SIZE,
                "max_new_tokens": 4,
                "updates_per_iteration": 1,
            },
            "rollout": {"replicas": 2},
            "schedule": {"kind": schedule},
        }
    )


def live(
    folder: Path,
    iterations: int,
    samples: int = 64,
    schedule: str = "sync",
    every: int = 1000,
    most_s: float = math.inf,
) -> Week:
    """Let a run live in a folder, from its first iteration to the proof of its ledger.

    Args:
        every: iterations between two looks.
        most_s: after which it is asked to end where it is.
    """
    week, run_dir = Week(iterations=iterations), folder / "run"
    run_dir.mkdir(parents=True)
    config = folder / "config.yaml"
    config.write_text(dump_resolved(config_of(folder, iterations, samples, schedule)))
    begun_s = time.monotonic()
    with (
        RedisProcess() as redis,
        (folder / "coordinator.log").open("wb") as log,
        (folder / "fleet.log").open("wb") as f,
    ):
        environment = ServiceEnvironment(REDIS_URL=redis.url, TANDEM_RUN_ID=RUN_ID, TANDEM_RUN_DIR=run_dir)
        variables = {**os.environ, "REDIS_URL": redis.url, "TANDEM_RUN_ID": RUN_ID, "TANDEM_RUN_DIR": str(run_dir)}
        fleet = _start(f, variables, "tools.week.fleet", environment.redis_url, RUN_ID)
        try:
            coordinator = _start(log, variables, "coordinator", "--config", str(config))
            try:
                _observe(week, coordinator, run_dir, every, begun_s + most_s)
            finally:
                coordinator.terminate()
                coordinator.wait(timeout=60)
        finally:
            fleet.terminate()
            fleet.wait(timeout=60)
    week.seconds = time.monotonic() - begun_s
    _prove(week, run_dir)
    return week


def _start(log: object, variables: dict[str, str], *command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", *command], env=variables, stdout=log, stderr=log)  # type: ignore[call-overload,no-any-return]


def _observe(week: Week, coordinator: "subprocess.Popen[bytes]", run_dir: Path, every: int, until_s: float) -> None:
    observer = Observer(process=psutil.Process(coordinator.pid), run_dir=run_dir, every=every, looks=week.looks)
    moved_s, last = time.monotonic(), 0
    while coordinator.poll() is None and observer.iteration < week.iterations and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        try:
            observer.look()
        except psutil.NoSuchProcess:
            break
        if observer.iteration != last:
            moved_s, last = time.monotonic(), observer.iteration
        elif time.monotonic() - moved_s > _HANG_S:
            week.wrong.append(f"no iteration after {last} for {_HANG_S:g} s")
            return
    begun_s = time.monotonic()
    if observer.iteration < week.iterations:
        coordinator.terminate()
    week.iterations = observer.iteration
    try:
        code = coordinator.wait(timeout=PROOF_S)
    except subprocess.TimeoutExpired:
        week.wrong.append(f"the run does not end {PROOF_S:g} s after its last iteration")
        return
    week.wrong += [f"the coordinator ended with {code}: see its log"] if code else []
    week.end_s = time.monotonic() - begun_s
    week.wrong += problems(week.looks)


def _prove(week: Week, run_dir: Path) -> None:
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "launcher", "ledger", str(run_dir), "--verify"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROOF_S, check=False)
    except subprocess.TimeoutExpired:
        week.wrong.append(f"the ledger is not proven within {PROOF_S:g} s")
        return
    week.proof_s = time.monotonic() - begun_s
    week.proof = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    week.wrong += [] if done.returncode == 0 else [f"the ledger is not proven: {done.stdout}{done.stderr}"]


def main() -> int:
    """Parse the command line, run, write the report. Returns: the exit code."""
    parser = argparse.ArgumentParser(prog="tools.week", description=__doc__)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=64, help="of an iteration")
    parser.add_argument("--schedule", default="sync", choices=["sync", "one_step_off", "async"])
    parser.add_argument("--every", type=int, default=1000, help="iterations between two looks")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which the run is asked to end")
    parser.add_argument("--out", type=Path, default=None, help="folder for run and report; default: a temporary one")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="week-")) if options.out is None else options.out
    week = live(folder, options.iterations, options.samples, options.schedule, options.every, 60 * options.minutes)
    (folder / "week.json").write_text(json.dumps(asdict(week), indent=1))
    (folder / "week.md").write_text(week.report())
    print(week.report())
    return 1 if week.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
