"""`tandem status` without a launcher: where a service's own variables say which run is meant, as in a pod."""

import json
from pathlib import Path

import pytest

from launcher.view.status import current_run, describe
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
