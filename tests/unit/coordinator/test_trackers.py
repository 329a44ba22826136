"""A tracker gets each iteration once, across failures and resumes; the settings that it shows have no secrets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator.record.sinks import FinishedIteration
from coordinator.record.trackers.base import RETRY_S, Outcome, RunFacts, Tracker
from coordinator.record.trackers.completions import Shown
from coordinator.record.trackers.settings import public_settings
from tandem_config.loading import load_config
from tandem_files.metrics_file import METRICS_FILE, MetricsFile


@dataclass
class FakeBackend:
    """Keeps what it gets; fails while `broken`."""

    rewinds: bool = False
    resends: int = 0
    broken: bool = False
    kind: str = "fake"
    opened: list[tuple[str, int]] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    ended: str = ""

    def open(self, run_id: str, after: int) -> tuple[str, str]:
        if self.broken:
            raise ConnectionError("no route")
        self.opened.append((run_id, after))
        return run_id or "abc", ""

    def log(self, iteration: int, values: dict[str, float]) -> None:
        if self.broken:
            raise ConnectionError("no route")
        assert values == {"reward_mean": 0.5}
        self.got.append(iteration)

    def show(self, iteration: int, completions: Sequence[Shown]) -> None:
        raise NotImplementedError

    def close(self, outcome: Outcome) -> None:
        self.ended = outcome


class Launch:
    """A process of a run: writes rows, and gives them to its tracker."""

    def __init__(self, folder: Path, backend: FakeBackend) -> None:
        self.now_s = 0.0
        self.rows = MetricsFile(folder / METRICS_FILE)
        facts = RunFacts(name="r", run_dir=folder, settings={}, outcome=lambda: "interrupted")
        self.tracker = Tracker(backend, facts, lambda: self.now_s)

    def iterate(self, *numbers: int) -> list[str]:
        warnings = []
        for number in numbers:
            row = {"iteration": number, "reward_mean": 0.5, "loss": None}
            self.rows.append(row)
            warnings.append(self.tracker.take(FinishedIteration(record=None, row=row)))
        return [warning for warning in warnings if warning is not None]


def test_iterations_arrive_once_and_the_end_is_told(tmp_path: Path) -> None:
    backend = FakeBackend()
    launch = Launch(tmp_path, backend)
    assert launch.iterate(0, 1, 2, 3) == []
    launch.tracker.close()
    assert (backend.opened, backend.got, backend.ended) == ([("", -1)], [0, 1, 2, 3], "interrupted")


def test_a_tracker_that_was_away_gets_what_it_lacks(tmp_path: Path) -> None:
    backend = FakeBackend(broken=True)
    launch = Launch(tmp_path, backend)
    (warning,) = launch.iterate(1, 2)
    assert "fake does not take the figures: ConnectionError: no route" in warning
    backend.broken = False
    assert launch.iterate(3) == []
    assert backend.got == [], "tried again before its time"
    launch.now_s = RETRY_S + 1
    assert launch.iterate(4) == []
    assert backend.got == [1, 2, 3, 4]


def test_what_is_missing_at_the_end_is_sent_then(tmp_path: Path) -> None:
    backend = FakeBackend(broken=True)
    launch = Launch(tmp_path, backend)
    launch.iterate(1, 2)
    backend.broken = False
    launch.tracker.close()
    assert (backend.got, backend.ended) == ([1, 2], "interrupted")


def test_a_tracker_that_is_still_away_at_the_end_says_so(tmp_path: Path) -> None:
    launch = Launch(tmp_path, FakeBackend(broken=True))
    launch.iterate(1, 2)
    warning = launch.tracker.close()
    assert warning is not None
    assert warning.startswith("fake has the iterations up to 0, of 2, and not how the run ended: ConnectionError")


@pytest.mark.parametrize(("rewinds", "after", "got"), [(False, 4, [5]), (True, 2, [3, 4, 5])])
def test_a_resume_continues_the_trackers_run(tmp_path: Path, rewinds: bool, after: int, got: list[int]) -> None:
    """Iterations 3 and 4 are repeated: a tracker that cannot forget keeps its first figures."""
    Launch(tmp_path, FakeBackend()).iterate(1, 2, 3, 4)
    MetricsFile(tmp_path / METRICS_FILE).cut_after(2)
    backend = FakeBackend(rewinds=rewinds)
    Launch(tmp_path, backend).iterate(3, 4, 5)
    assert (backend.opened, backend.got) == ([("abc", after)], got)


@pytest.mark.parametrize(("is_closed", "got"), [(True, [5]), (False, [3, 4, 5])])
def test_what_a_killed_process_may_have_lost_is_sent_again(tmp_path: Path, is_closed: bool, got: list[int]) -> None:
    launch = Launch(tmp_path, FakeBackend(resends=2))
    launch.iterate(1, 2, 3, 4)
    if is_closed:
        launch.tracker.close()
    backend = FakeBackend(resends=2)
    Launch(tmp_path, backend).iterate(5)
    assert backend.got == got


def test_a_tracker_that_is_added_on_a_resume_gets_all_iterations(tmp_path: Path) -> None:
    for number in (1, 2):
        MetricsFile(tmp_path / METRICS_FILE).append({"iteration": number, "reward_mean": 0.5})
    backend = FakeBackend(rewinds=True)
    Launch(tmp_path, backend).iterate(3)
    assert backend.got == [1, 2, 3]


def test_settings_are_flat_and_without_secrets(tmp_path: Path) -> None:
    tracker = "{kind: mlflow, uri: 'http://me:pass@mlflow:5000/x'}"
    config = load_config(None, [f"model.path={tmp_path}", "data.train=a.jsonl", f"trackers=[tensorboard, {tracker}]"])
    settings = public_settings(config)
    assert settings["grpo.group_size"] == 16
    assert settings["data.prompt_key"] == config.data.prompt_key
    assert settings["trackers.1.uri"] == "http://mlflow:5000/x"
    assert "grpo.dual_clip" not in settings
    assert not any("pass" in str(value) for value in settings.values())
