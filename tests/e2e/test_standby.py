"""A standby over real engines takes over from a leader that is killed, then from one that freezes; default settings."""

import datetime
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem_config.loading import draft_config
from tandem_files.ledger.reading import read_ledger
from tandem_files.metrics_file import MetricsFile
from tests.e2e.conftest import EXAMPLE, SMALL
from tests.kit.processes import START_S, Services
from tests.kit.redis import RedisProcess
from tests.kit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]
STEP = SMALL["grpo.prompts_per_iteration"] * SMALL["grpo.group_size"]
CHANGES = SMALL | {"run.iterations": 1000, "run.evaluate_every": 1000, "run.checkpoint_every": 50}


class Run(Services):
    """A trainer, a replica, and coordinators that all stand by."""

    def begin(self, path: Path) -> None:
        settings = [f"{key}={value}" for key, value in CHANGES.items()]
        draft = draft_config(EXAMPLE, [*settings, f"run.output_dir={path}"])
        assert draft.config is not None, draft.problems
        self.config = draft.config
        self.start_trainer(self.config)
        self.start_rollout("rollout-0", self.config)
        self.address_of("rollout", "rollout-0")
        self.address_of("trainer", "trainer")

    def stand_by(self, name: str) -> None:
        self.start(name, ["coordinator", "--resume", "--standby"], self.config)

    def said(self, name: str, message: str) -> float:
        """When a coordinator logged a message first, in Unix time; 0: it has not."""
        for line in self.log(name).read_text(errors="replace").splitlines():
            record = json.loads(line) if line.startswith("{") else {}
            if str(record.get("message", "")).startswith(message):
                return datetime.datetime.fromisoformat(record["time"]).timestamp()
        return 0.0

    def num_rows(self) -> int:
        return len(MetricsFile(self.run_dir / "metrics.jsonl").rows())

    def advance(self, name: str) -> None:
        done = self.num_rows()
        until(lambda: self.num_rows() >= done + 2 or self.processes[name].poll() is not None, START_S)
        assert self.processes[name].poll() is None, self.tail(name)


@pytest.fixture
def run(tmp_path: Path, redis_process: Callable[..., RedisProcess]) -> Iterator[Run]:
    with Run(redis_process().url, tmp_path, "standby") as made:
        made.begin(tmp_path)
        yield made


def test_a_standby_takes_over_from_a_killed_and_from_a_frozen_leader(
    run: Run, record_property: Callable[[str, object], None]
) -> None:
    run.stand_by("a")
    run.advance("a")
    leader = "a"
    for name, number in (("b", signal.SIGKILL), ("c", signal.SIGSTOP)):
        run.stand_by(name)
        until(lambda name=name: run.said(name, "standby: waiting"), START_S)  # type: ignore[misc]
        lost_s = time.time()
        run.processes[leader].send_signal(number)
        until(lambda name=name: run.said(name, "services taken over"), START_S)  # type: ignore[misc]
        record_property(f"{number.name}_s", run.said(name, "services taken over") - lost_s)
        run.advance(name)
        leader = name
    run.processes["b"].send_signal(signal.SIGCONT)
    assert run.processes["b"].wait(START_S) == 1
    run.advance("c")
    assert run.stop(["c"]) == [0]
    rows = MetricsFile(run.run_dir / "metrics.jsonl").rows()
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    versions = [int(row["policy_version"] or 0) for row in rows]
    assert versions == list(range(1, len(rows) + 1))  # no step was done again
    ledger = read_ledger(run.run_dir)
    assert ledger.problems == []
    # A leader may end between the note of a step and the step, once each time.
    assert ledger.account.counts["returned"] in [count * STEP for count in (0, 1, 2)]
