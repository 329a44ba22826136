"""A trainer, then a coordinator, of a run on real engines is asked to end (a drained node): no iteration is lost."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servicekit.lifecycle.exit_codes import EXIT_OK
from tandem_config.loading import draft_config
from tandem_files.checkpoints import newest_sound
from tandem_files.metrics_file import MetricsFile
from tests.e2e.conftest import EXAMPLE, SMALL
from tests.kit.processes import START_S, Services
from tests.kit.redis import RedisProcess
from tests.kit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
NEVER = 100_000
CHANGES = SMALL | {"run.iterations": NEVER, "run.evaluate_every": NEVER, "run.checkpoint_every": NEVER}


class Run(Services):
    """A trainer, a replica, and coordinators of one run, which saves only when something ends."""

    def begin(self, path: Path, **changes: Any) -> None:
        settings = [f"{key}={value}" for key, value in {**CHANGES, **changes}.items()]
        draft = draft_config(EXAMPLE, [*settings, f"run.output_dir={path}"])
        assert draft.config is not None, draft.problems
        self.config = draft.config
        self.start_trainer(self.config)
        self.start_rollout("rollout-0", self.config)
        self.start_coordinator("first")

    def start_coordinator(self, name: str) -> None:
        self.start(name, ["coordinator", "--resume"], self.config)

    def iterations(self) -> list[int]:
        return [int(row["iteration"] or 0) for row in MetricsFile(self.run_dir / "metrics.jsonl").rows()]

    def wait_for_iterations(self, number: int) -> None:
        until(lambda: len(self.iterations()) >= number, START_S, f"iteration {number}", interval_s=0.05)

    def saved(self) -> int | None:
        sound = newest_sound(self.run_dir)
        return None if sound is None else sound.iteration


@pytest.fixture
def run(tmp_path: Path, redis_process: Callable[..., RedisProcess]) -> Iterator[Run]:
    with Run(redis_process().url, tmp_path, "drain") as made:
        yield made


@pytest.mark.parametrize("written", ["at once", "beside the training"])
def test_what_was_trained_is_saved_before_a_service_ends(run: Run, tmp_path: Path, written: str) -> None:
    run.begin(tmp_path, **{"run.checkpoint_async": written != "at once"})
    run.wait_for_iterations(3)
    assert run.saved() is None
    run.processes["trainer-0"].send_signal(signal.SIGTERM)
    assert run.exit_codes(["trainer-0"]) == [EXIT_OK]
    done = run.iterations()
    assert done == list(range(1, len(done) + 1))
    assert run.saved() == done[-1] >= 3
    assert "trainer asked to end: saving a checkpoint" in run.log("first").read_text()

    run.start_trainer(run.config, "--resume")
    run.wait_for_iterations(len(done) + 2)
    # Its loss is noticed only if it takes longer than a second: then the run says how many steps were done again.
    assert set(re.findall(r"(\d+) steps since its checkpoint were done again", run.log("first").read_text())) <= {"0"}
    run.processes["first"].send_signal(signal.SIGTERM)
    assert run.exit_codes(["first"]) == [EXIT_OK]
    again = run.iterations()
    assert again == list(range(1, len(again) + 1))
    assert run.saved() == again[-1] >= len(done) + 2
    # Nothing is unsaved, and no coordinator asks: the trainer ends without waiting for one.
    run.processes["trainer-0"].send_signal(signal.SIGTERM)
    assert run.exit_codes(["trainer-0"]) == [EXIT_OK]
    assert "shutdown: checkpoint not saved" not in run.log("trainer-0").read_text()
