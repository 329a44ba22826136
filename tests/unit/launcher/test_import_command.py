"""`tandem import`: from a configuration to a trainer checkpoint, and what it says when that cannot be."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from tandem_files.digests import damages, read_manifest
from tests.kit.folders import write_config, write_model
from trainer_service.checkpoints.files import read_meta

# The first of these tests imports torch.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, model={"path": str(write_model(tmp_path / "whole"))})


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["import", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.runs("tandem import")
def test_a_model_becomes_a_checkpoint_at_the_configured_sizes(tmp_path: Path, config: Path) -> None:
    out = tmp_path / "start"
    for _ in range(2):  # an earlier import is replaced
        code, text = run(config, "--out", out, "--set", "trainer.tensor_parallel=2")
        assert code == 0, text
        assert f"is in {out}" in text
        assert "for 2 ranks" in text
    assert damages(out, read_manifest(out)) == []
    assert read_meta(out)["parallel"]["tensor"] == 2
    assert {path.name for path in out.glob("*.safetensors")} == {
        "shard-tp00-pp00.safetensors",
        "shard-tp01-pp00.safetensors",
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "trainer.tensor_parallel=64"], "64"),
        (["--set", "model.path=nowhere"], "nowhere"),
        (["--set", "trainer.tensor_paralel=2"], "trainer.tensor_parallel"),
    ],
)
def test_what_cannot_be_imported_is_said(tmp_path: Path, config: Path, options: list[str], says: str) -> None:
    code, text = run(config, "--out", tmp_path / "start", *options)
    assert code == 2, text
    assert says in text
    assert not (tmp_path / "start").exists()


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path, config: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    code, text = run(config, "--out", mine)
    assert (code, (mine / "thesis.txt").read_text()) == (2, "x")
    assert f"--out {mine} holds something else than a trainer checkpoint" in text
