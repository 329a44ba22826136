"""A checkpoint that a run cannot start from is named before anything is started, as its trainer would name it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.check.preflight import preflight
from launcher.cli import app
from tandem_config.loading import draft_config
from tandem_config.problems import ConfigProblem
from tandem_files.digests import file_digest, write_manifest
from tests.kit.folders import write_config, write_model

# The first of these tests imports torch.
pytestmark = pytest.mark.timeout(60)
KEY = "trainer.initial_checkpoint"
SHARD = "shard-tp01-pp00.safetensors"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration, and a checkpoint of its model in the folder `start`."""
    file = write_config(tmp_path)
    arguments = ["import", str(file), "--out", str(tmp_path / "start"), "--set", "trainer.tensor_parallel=2"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return file


def check(file: Path, *overrides: str, resume: Path | None = None) -> list[ConfigProblem]:
    draft = draft_config(file, [f"{KEY}={file.parent / 'start'}", *overrides])
    found = preflight(draft, redis_url=None, resume=resume)
    return [problem for problem in found if "cores" not in problem.message]


def test_one_that_fits_is_good_at_any_layout(config: Path) -> None:
    assert check(config) == []


def with_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    write_manifest(folder, {path.name: file_digest(path) for path in folder.iterdir() if path.name != "digests.json"})


def inside(folder: Path) -> None:
    folder.rename(folder.with_name("trainer"))
    folder.mkdir()
    folder.with_name("trainer").rename(folder / "trainer")


WRONG: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda folder: folder.rename(folder.with_name("elsewhere")), "there is no such folder"),
    ("no manifest", lambda folder: (folder / "digests.json").unlink(), "digests.json cannot be read"),
    ("no shard", lambda folder: (folder / SHARD).unlink(), f"{SHARD} is missing"),
    ("cut", lambda folder: os.truncate(folder / SHARD, 99), f"{SHARD} has 99 bytes"),
    ("foreign", lambda folder: (folder / "shard-tp09-pp00.safetensors").touch(), "is not in digests.json"),
    ("no meta", lambda folder: (folder / "meta.json").unlink(), "meta.json is missing"),
    ("format", lambda folder: with_meta(folder, format=2), "has checkpoint format 2; this trainer reads 1"),
    ("layout", lambda folder: with_meta(folder, parallel={"x": 1}), "has no usable parallel sizes"),
    ("whole", inside, "is a whole checkpoint, not the trainer's part"),
]


@pytest.mark.parametrize(("spoil", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_one_that_cannot_be_read_is_named(config: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(config.parent / "start")
    (problem,) = check(config)
    assert (problem.key, problem.value, problem.severity) == (KEY, str(config.parent / "start"), "error")
    assert message in problem.message


def test_one_of_another_model_or_type_is_named_with_all_that_differs(config: Path) -> None:
    write_model(config.parent / "model", rope_theta=5e5)
    (problem,) = [found for found in check(config, "model.dtype=bfloat16") if found.key == KEY]
    for part in ("is of another run than this", "model.dtype: float32 in the checkpoint, bfloat16 in the run", "rope"):
        assert part in problem.message


def test_a_run_that_resumes_does_not_read_it(config: Path) -> None:
    assert [problem.key for problem in check(config, f"{KEY}=nowhere", resume=config.parent / "none")] == ["--resume"]


def test_tandem_check_refuses_it(config: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(config), "--set", f"{KEY}=nowhere"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert KEY in result.output
    assert "there is no such folder" in result.output
