"""`tandem status` without a launcher: where a service's own variables say which run is meant, as in a pod."""

import json
import os
from pathlib import Path

import pytest
import yaml

from launcher.view.status import current_run, describe, newest_run
from servicekit.errors import ConfigError


def variables(run_dir: Path, redis_url: str) -> dict[str, str]:
    return {"REDIS_URL": redis_url, "TANDEM_RUN_ID": "t", "TANDEM_RUN_DIR": str(run_dir)}


def test_a_services_own_run_is_meant_without_a_name(tmp_path: Path) -> None:
    assert current_run({"TANDEM_RUN_DIR": str(tmp_path)}) == tmp_path


def test_a_run_whose_coordinator_is_gone_says_how_it_ended(tmp_path: Path, redis_server: str) -> None:
    environ = variables(tmp_path, redis_server)
    lines = dict(describe(tmp_path, environ))
    assert lines["state"].startswith("no coordinator is announced")
    assert "ended" not in lines
    state = {"status": "failed", "error": "the trainer is dead, waiting would not help: trainer-0: no such image"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert dict(describe(tmp_path, environ))["ended"] == f"failed: {state['error']}"


def test_a_redis_that_does_not_answer_is_named(tmp_path: Path) -> None:
    said = dict(describe(tmp_path, variables(tmp_path, "unix:///nowhere.sock")))
    assert said["state"].startswith("unknown: Redis at unix:///nowhere.sock is unreachable")


def test_a_folder_of_another_run_is_looked_at_as_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run's folder"):
        describe(tmp_path / "other", variables(tmp_path, "unix:///nowhere.sock"))


RESULTS = {
    "model": "/models/one",
    "sets": [
        {
            "settings": {"name": "aime"},
            "num_prompts": 30,
            "measures": {
                "mean@2": {"value": 0.5, "low": 0.25, "high": 0.75},
                "pass@2": {"value": 0.6, "low": 0.4, "high": 0.8},
            },
        }
    ],
    "columns": {"eval/aime/length_mean": 12.25, "eval/aime/truncated_ratio": 0.125},
}


def folder_of(path: Path, *, written_s: int, serve_model: bool = False, **files: object) -> Path:
    path.mkdir()
    (path / "config.resolved.yaml").write_text(yaml.safe_dump({"rollout": {"serve_model": serve_model}}))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    for file in (*path.iterdir(), path):
        os.utime(file, (written_s, written_s))
    return path


def test_without_a_folder_the_newest_run_that_trains_is_meant(tmp_path: Path) -> None:
    finished = folder_of(tmp_path / "evaluate-a", written_s=300, serve_model=True, evaluation=RESULTS)
    folder_of(tmp_path / "evaluate-b", written_s=200, serve_model=True)
    assert newest_run(tmp_path) == finished
    folder_of(tmp_path / "old", written_s=50)
    # A run may set what only evaluations need; its launcher's notes say that it is one.
    notes = {"pid": 1, "run_id": "t"}
    trained = folder_of(tmp_path / "new", written_s=100, serve_model=True, launcher=notes)
    assert newest_run(tmp_path) == trained


def test_an_evaluation_has_its_results(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "evaluate-a", written_s=1, serve_model=True, evaluation=RESULTS)
    assert describe(folder, {}) == [
        ("evaluation", str(folder)),
        ("state", "finished"),
        ("model", "/models/one"),
        ("aime", "mean@2 0.500 (95 %: 0.250 to 0.750), 30 prompts, 12.2 tokens, 12.5% cut off"),
        ("", "pass@2 0.600 (95 %: 0.400 to 0.800)"),
    ]


def test_an_evaluation_without_results_says_where_to_look(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "evaluate-b", written_s=1, serve_model=True)
    assert dict(describe(folder, {}))["state"] == f"not running, without results; logs: {folder / 'logs'}"
