"""`tandem checkpoints`: what each checkpoint of a run holds, and which file and tensor of it is damaged."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from launcher.cli import app
from tandem_files.checkpoints import BestCheckpoint, inspect, mark_best, mark_complete, mark_latest, step_folder
from tandem_files.digests import file_digest, write_manifest
from tandem_files.model.safetensors_header import read_header
from tests.kit.checkpoints import write_trainer_checkpoint
from tests.kit.stores import canonical_tensors, tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.transfer.tensors import tensor_checksums

pytestmark = pytest.mark.timeout(180)
SHARD = "shard-tp01-pp00.safetensors"
NAME = "weights/decoder.final_layernorm.weight"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints after iterations 4, 8 (of another layout, and the best) and an unfinished 12."""
    spec, full = tiny_spec(), canonical_tensors(tiny_spec())
    for iteration, parallel in ((4, Parallel(tensor=2)), (8, Parallel(pipeline=2, virtual_pipeline=2))):
        folder = step_folder(tmp_path, iteration)
        write_trainer_checkpoint(folder / "trainer", spec, parallel, full, step=3.0, exp_avg=full)
        mark_complete(folder, policy_version=iteration)
    step_folder(tmp_path, 12).mkdir()
    mark_latest(tmp_path)
    mark_best(tmp_path, BestCheckpoint(iteration=4, policy_version=4, metric="hard/mean@8", value=0.5))
    return tmp_path


def checkpoints(run_dir: Path, *options: str) -> tuple[int, list[str]]:
    """Runs the command. Returns: its exit code, and the lines that it printed."""
    result = CliRunner().invoke(app, ["checkpoints", str(run_dir), *options], env={"COLUMNS": "300"})
    return result.exit_code, [" ".join(line.split()) for line in result.output.splitlines()]


@pytest.mark.runs("tandem checkpoints")
def test_each_checkpoint_is_listed_with_what_it_holds(run_dir: Path) -> None:
    code, lines = checkpoints(run_dir)
    size = sum(path.stat().st_size for path in step_folder(run_dir, 4).rglob("*") if path.is_file()) / 2**20
    assert code == 0
    assert lines[0] == "iteration version size layout holds state"
    assert lines[1] == f"4 4 {size:.1f} MiB TP2 float32 weights, AdamW undamaged, best by hard/mean@8 (0.5)"
    assert "PP2 VPP2 float32 weights, AdamW undamaged, a resume continues here" in lines[2]
    assert lines[3] == "12 - 0.0 MiB - - unfinished"


def test_damage_is_named_by_file_and_tensor(run_dir: Path) -> None:
    trainer = step_folder(run_dir, 4) / "trainer"
    held = load_file(trainer / SHARD)
    save_file(held, trainer / SHARD, metadata=tensor_checksums(held))
    write_manifest(trainer, {path.name: file_digest(path) for path in trainer.iterdir() if path.suffix != ".json"})
    mark_complete(step_folder(run_dir, 4), policy_version=4)
    assert checkpoints(run_dir)[0] == 0
    content = bytearray((trainer / SHARD).read_bytes())
    content[read_header(trainer / SHARD)[NAME].begin] ^= 1
    (trainer / SHARD).write_bytes(content)
    code, lines = checkpoints(run_dir)
    assert code == 1
    assert lines[1].endswith("damaged, best by hard/mean@8 (0.5)")
    assert lines[-1] == (
        f"iteration 4 is damaged: trainer/{SHARD} has other bytes than were written, in {NAME}: restore the file from "
        "a copy, or use another one"
    )
    assert checkpoints(run_dir, "--quick")[0] == 0  # it has not looked


def test_a_damaged_header_is_named(run_dir: Path) -> None:
    path = step_folder(run_dir, 8) / "trainer" / "shard-tp00-pp01.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"x" + path.read_bytes()[9:])
    code, lines = checkpoints(run_dir)
    assert code == 1
    assert "has other bytes than were written, in its header (is corrupt: its header is not JSON)" in lines[-1]
    assert "a resume continues here" in lines[1]


def test_a_run_may_rename_and_remove_meanwhile(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iteration 4 is pruned after its files were listed, 8 while its digests are compared; 12 becomes another name."""
    (step_folder(run_dir, 12) / ".trainer.partial").mkdir()
    listed, inspected = os.walk, inspect

    def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for parent, folders, names in listed(folder):
            if folder == step_folder(run_dir, 4):
                shutil.rmtree(folder, ignore_errors=True)
            yield parent, folders, [*names, "renamed meanwhile"]

    def prune(folder: Path, *, deep: bool) -> str:
        (folder / "complete.json").unlink()
        shutil.rmtree(folder / "trainer")
        return inspected(folder, deep=deep)

    monkeypatch.setattr(os, "walk", walk)
    monkeypatch.setattr("launcher.checkpoints.inspect", prune)
    code, lines = checkpoints(run_dir)
    assert code == 0
    assert [line.split()[0] for line in lines[1:]] == ["8", "12"]
    assert all(line.endswith("- unfinished") for line in lines[1:])


@pytest.mark.parametrize(("name", "says"), [("nothing", "no such folder"), ("", "has no checkpoints/step-* yet")])
def test_a_folder_without_checkpoints_is_said(tmp_path: Path, name: str, says: str) -> None:
    code, lines = checkpoints(tmp_path / name)
    assert (code, lines[0]) == (2, f"{tmp_path / name}: {says}: give the folder of a run")
