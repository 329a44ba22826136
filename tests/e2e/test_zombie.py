"""A coordinator over real engines that is stopped for longer than its lease, and wakes beside its successor."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc
from tandem_config.loading import draft_config
from tandem_files.metrics_file import MetricsFile
from tests.e2e.conftest import EXAMPLE, SMALL
from tests.kit.processes import START_S, Services
from tests.kit.redis import RedisProcess
from tests.kit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
CHANGES = SMALL | {
    "run.iterations": 1000,
    "run.evaluate_every": 1000,
    "grpo.prompts_per_iteration": 64,
    "sync.lease_ttl_s": 3,
}
FILES = ("coordinator.json", "trainer/meta.json")


class Run(Services):
    """A trainer, a replica, and coordinators of one run."""

    def begin(self, path: Path) -> None:
        settings = [f"{key}={value}" for key, value in CHANGES.items()]
        draft = draft_config(EXAMPLE, [*settings, f"run.output_dir={path}"])
        assert draft.config is not None, draft.problems
        self.config = draft.config
        self.start_trainer(self.config)
        self.start_rollout("rollout-0", self.config)
        self.address_of("rollout", "rollout-0")
        self.address_of("trainer", "trainer")

    def start_coordinator(self, name: str) -> None:
        self.start(name, ["coordinator", "--resume"], self.config)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = MetricsFile(self.folder / "run" / "metrics.jsonl").rows()
        return rows

    def stop_in(self, name: str, part: str) -> str:
        """Freeze the coordinator `name` once it has done two iterations and begins `part`. Returns: its address."""
        address = self.registry.wait_for("coordinator", ["coordinator"], START_S)[0].address
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(grpc.insecure_channel(address))
        done = 0
        for event in stub.WatchEvents(pb.WatchEventsRequest(), timeout=START_S):
            done += event.kind == pb.EVENT_KIND_ITERATION
            if done >= 2 and event.kind == pb.EVENT_KIND_PROGRESS and event.message == part:
                self.processes[name].send_signal(signal.SIGSTOP)
                return address
        raise AssertionError(f"the run of {name} has ended:\n{self.tail(name)}")

    def advances(self, name: str, rows: int) -> None:
        """Wait until the run has as many rows; what the coordinator `name` says if it ends before, or is too slow."""
        try:
            until(lambda: len(self.rows()) >= rows or self.processes[name].poll() is not None, START_S)
        except AssertionError as error:
            raise AssertionError(
                f"{name} has not come to {rows} rows, but to {len(self.rows())}:\n{self.tail(name)}"
            ) from error
        assert self.processes[name].poll() is None, self.tail(name)

    def ends_fenced(self, name: str) -> None:
        process = self.processes[name]
        process.send_signal(signal.SIGCONT)
        assert process.wait(START_S) == 1
        # Whichever it notices first: its name, its slot, or that it is refused.
        told = (
            "another coordinator leads the run",
            "replaced by a newer one",
            "another worker has held",
            "no longer leads the run",
        )
        assert any(words in self.tail(name) for words in told), self.tail(name)


@pytest.fixture
def run(tmp_path: Path, redis_process: Callable[..., RedisProcess]) -> Iterator[Run]:
    with Run(redis_process().url, tmp_path, "zombie") as made:
        made.begin(tmp_path)
        yield made


@pytest.mark.parametrize("part", ["generate", "checkpoint"])
def test_a_coordinator_that_wakes_beside_its_successor_leaves_no_trace(run: Run, part: str) -> None:
    run.start_coordinator("a")
    run.stop_in("a", part)
    done = len(run.rows())
    run.start_coordinator("b")
    if part == "generate":  # as early as can be: it would train its samples under the successor's hands
        until(lambda: "claimed slot" in run.tail("b"), START_S)
    else:
        run.advances("b", done + 3)
    run.ends_fenced("a")
    done = len(run.rows())
    run.advances("b", done + 3)
    assert run.stop(["b"]) == [0]
    rows = run.rows()
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    versions = [row["policy_version"] for row in rows]
    assert versions == sorted(set(versions))
    assert json.loads((run.folder / "run" / "state.json").read_text())["status"] == "interrupted"
    for folder in (run.folder / "run" / "checkpoints").glob("step-*"):
        if (folder / "complete.json").exists():
            coordinator, trainer = (json.loads((folder / name).read_text()) for name in FILES)
            assert coordinator["policy_version"] == trainer["policy_version"]
