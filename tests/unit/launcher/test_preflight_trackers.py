"""Trackers that cannot work are named before a run: library, login, server, folder."""

from pathlib import Path

import pytest

from launcher.check.preflight import preflight
from tandem_config.loading import draft_config
from tandem_config.problems import ConfigProblem
from tests.kit.folders import write_config


def check(file: Path, *overrides: str) -> list[ConfigProblem]:
    found = preflight(draft_config(file, list(overrides)), redis_url=None)
    return [problem for problem in found if "cores" not in problem.message]


@pytest.mark.parametrize(
    ("tracker", "key", "words"),
    [
        ("{kind: wandb}", "trackers.mode", "there is no login to W&B"),
        ("{kind: wandb, mode: offline, dir: /proc/x}", "trackers.dir", "/proc is not a folder that can be written"),
        ("mlflow", "trackers.uri", "there is no tracking server"),
        ("{kind: mlflow, uri: 'http://me:secret@127.0.0.1:9'}", "trackers.uri", "MLflow does not take it"),
        ("nosuch", "trackers.kind", "must be one of 'tensorboard', 'wandb', 'mlflow'"),
        ("[tensorboard, tensorboard]", "trackers", "listed twice"),
        ("[tensorboard, mlflow]", "trackers[1].uri", "there is no tracking server"),
    ],
)
@pytest.mark.timeout(60)  # imports W&B or MLflow
def test_trackers_that_cannot_work_are_named(
    tracker: str, key: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_config(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    (found,) = check(file, f"trackers={tracker if tracker.startswith('[') else f'[{tracker}]'}")
    assert found.key == key
    assert words in found.message
    assert "secret" not in str(found)
    assert found.severity == ("warning" if "http" in tracker else "error")


def test_a_tracker_whose_library_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_config(tmp_path)
    monkeypatch.setattr("launcher.check.trackers.importlib.util.find_spec", lambda name: None)
    found = [problem for problem in check(file, "trackers=tensorboard") if problem.key == "trackers"]
    assert [(problem.message, problem.suggestion) for problem in found] == [
        ("the Python package tensorboard is not installed", "pip install 'tandem[trackers]', or remove the entry")
    ]
