"""`tandem export`: from a run's folder to a Hugging Face folder, and what it says when that cannot be."""

import json
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from launcher.cli import app
from tandem_config.loading import dump_resolved, load_config
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.run_config import RESOLVED_CONFIG
from tests.kit.checkpoints import write_trainer_checkpoint
from tests.kit.folders import write_config
from tests.kit.stores import canonical_tensors, same
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

# torch and safetensors are imported by the first of these tests, and by processes of one.
pytestmark = pytest.mark.timeout(180)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints after iterations 4 and 8, whose weights differ."""
    config = load_config(write_config(tmp_path))
    spec, folder = ModelSpec.from_folder(config.model.path), tmp_path / "runs" / "tiny"
    for seed in (4, 8):
        checkpoint = step_folder(folder, seed)
        write_trainer_checkpoint(checkpoint / "trainer", spec, Parallel(tensor=2), canonical_tensors(spec, seed))
        mark_complete(checkpoint)
    (folder / RESOLVED_CONFIG).write_text(dump_resolved(config))
    return folder


def export(run_dir: Path, out: Path, *options: str) -> tuple[int, str]:
    """Runs the command. Returns: its exit code, and what it printed."""
    result = CliRunner().invoke(app, ["export", str(run_dir), "--out", str(out), *options])
    return result.exit_code, result.output


def against(run_dir: Path, reference: Path, *options: str) -> tuple[int, str]:
    """Compares. Returns: the exit code, and what was printed."""
    result = CliRunner().invoke(app, ["export", str(run_dir), "--test", str(reference), *options])
    return result.exit_code, result.output


def test_the_trainers_image_does_the_same_without_the_launchers_packages(run_dir: Path, tmp_path: Path) -> None:
    """The image has neither rich nor typer, nor the launcher."""
    (run_dir / RESOLVED_CONFIG).unlink()
    guard = "import sys; sys.modules.update(dict.fromkeys(['rich', 'typer', 'launcher', 'coordinator', 'jinja2'])); "
    start = [sys.executable, "-c", guard + "from trainer_service.export import main; sys.exit(main())", str(run_dir)]

    def export_in_image(*options: str) -> "subprocess.CompletedProcess[str]":
        command = [*start, "--out", str(tmp_path / "out"), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)

    refused = export_in_image()
    assert (refused.returncode, f"has no {RESOLVED_CONFIG}" in refused.stderr) == (2, True), refused.stderr
    config = ("-c", str(tmp_path / "tiny.yaml"))
    wrong = export_in_image(*config, "--set", "model.pth=x")
    assert (wrong.returncode, "did you mean model.path" in wrong.stderr) == (2, True), wrong.stderr
    done = export_in_image(*config, "--checkpoint", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"iteration 4 of {run_dir} is in {tmp_path / 'out'}")
    assert (
        same(
            load_file(tmp_path / "out" / "model.safetensors"),
            canonical_tensors(ModelSpec.from_folder(tmp_path / "out"), 4),
        )
        == []
    )


@pytest.mark.parametrize(("options", "iteration"), [((), 8), (("--checkpoint", "last"), 8), (("--checkpoint", "4"), 4)])
def test_the_chosen_checkpoint_is_written_with_its_tokenizer(
    run_dir: Path, tmp_path: Path, options: tuple[str, ...], iteration: int
) -> None:
    out = tmp_path / "deep" / "out"
    for _ in range(2):  # an earlier export is replaced
        code, output = export(run_dir, out, *options)
        assert code == 0, output
        mib = (out / "model.safetensors").stat().st_size / 2**20
        said = re.match(r"iteration (\d) of .* \((\d+\.\d\d) MiB of weights\)", output.replace("\n", " "))
        assert said is not None, output
        assert int(said[1]) == iteration
        assert float(said[2]) == pytest.approx(mib, abs=0.02)
    spec = ModelSpec.from_folder(out)
    assert same(load_file(out / "model.safetensors"), canonical_tensors(spec, iteration)) == []
    names = {"config.json", "model.safetensors", "tandem_export.json", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == names
    mark = json.loads((out / "tandem_export.json").read_text())
    assert (mark["iteration"], mark["policy_version"]) == (iteration, 3)


def test_the_runs_own_chat_template_comes_along(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "chat_template.jinja").write_text("mine")
    code, output = export(run_dir, tmp_path / "out")
    assert (code, (tmp_path / "out" / "chat_template.jinja").read_text()) == (0, "mine"), output


def test_a_folder_with_something_else_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").write_text("years of work")
    code, output = export(run_dir, tmp_path / "thesis")
    assert (code, "holds something else than an exported model" in output) == (2, True)
    assert (tmp_path / "thesis" / "text.tex").read_text() == "years of work"


def test_a_checkpoint_that_is_not_there_or_damaged_is_named(run_dir: Path, tmp_path: Path) -> None:
    code, output = export(run_dir, tmp_path / "out", "--checkpoint", "5")
    assert (code, "no checkpoint of iteration 5: give last, best or an iteration, here 4, 8" in output) == (2, True)
    shard = step_folder(run_dir, 8) / "trainer" / "shard-tp01-pp00.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    code, output = export(run_dir, tmp_path / "out", "--checkpoint", "8")
    assert (code, "shard-tp01-pp00.safetensors has other bytes" in output) == (2, True)
    code, output = export(run_dir, tmp_path / "out")
    assert code == 0
    assert "warning: the checkpoint of iteration 8 is damaged" in output
    assert "iteration 4 of" in output


def test_a_model_that_has_moved_is_named_by_its_new_place(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model").rename(tmp_path / "moved")
    code, output = export(run_dir, tmp_path / "out")
    assert (code, "--set model.path=DIR" in output) == (2, True)
    assert export(run_dir, tmp_path / "out", "--set", f"model.path={tmp_path / 'moved'}")[0] == 0
    code, output = export(run_dir, tmp_path / "out", "--set", "model.pth=x")
    assert (code, "did you mean model.path" in output) == (2, True)


def test_what_is_no_runs_folder_is_refused_unless_its_configuration_is_given(run_dir: Path, tmp_path: Path) -> None:
    code, output = export(tmp_path / "none", tmp_path / "out")
    assert (code, f"{tmp_path / 'none'}: no such folder" in output) == (2, True)
    (run_dir / RESOLVED_CONFIG).unlink()
    code, output = export(run_dir, tmp_path / "out")
    assert (code, f"has no {RESOLVED_CONFIG}" in output) == (2, True)
    assert export(run_dir, tmp_path / "out", "-c", str(tmp_path / "tiny.yaml"))[0] == 0


def test_too_little_space_is_told_before_anything_is_written(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 9, 1))
    code, output = export(run_dir, tmp_path / "out")
    assert (code, " MiB free: choose another folder" in output) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_fails_and_leaves_nothing(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weightsync.transfer.hf_files.settle", full)
    before = sorted(tmp_path.iterdir())
    code, output = export(run_dir, tmp_path / "out")
    assert (code, "cannot write" in output, "No space left on device" in output) == (1, True, True)
    assert sorted(tmp_path.iterdir()) == before


def test_an_export_equals_its_checkpoint_and_differs_from_another(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "out", "--checkpoint", "4")[0] == 0
    files = sorted(path.name for path in tmp_path.iterdir())
    code, output = against(run_dir, tmp_path / "out", "--checkpoint", "4")
    assert code == 0
    assert output.startswith(f"iteration 4 of {run_dir} against {tmp_path / 'out'}: ")
    assert output.rstrip().endswith(" tensors, all bitwise equal")
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    path = tmp_path / "out" / "model.safetensors"
    held = load_file(path)
    held["model.norm.weight"][3] += 0.5
    save_file(held, path)
    code, output = against(run_dir, tmp_path / "out", "--checkpoint", "4")
    assert (code, "; the largest absolute difference is 0.5, in model.norm.weight (--tolerance 0)" in output) == (
        1,
        True,
    )
    assert f"{len(held)} tensors with the same names and shapes, {len(held) - 1} bitwise equal" in output
    assert against(run_dir, tmp_path / "out", "--checkpoint", "4", "--tolerance", "0.499")[0] == 1
    assert against(run_dir, tmp_path / "out", "--checkpoint", "4", "--tolerance", "0.5")[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_rounded_to_the_type_asked_for(run_dir: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    name, out = str(dtype).removeprefix("torch."), tmp_path / "out"
    code, output = export(run_dir, out, "--dtype", name)
    assert code == 0, output
    full = canonical_tensors(ModelSpec.from_folder(out), 8)
    assert same(load_file(out / "model.safetensors"), {each: tensor.to(dtype) for each, tensor in full.items()}) == []
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == (name, name)
    code, output = against(run_dir, out, "--dtype", name)
    assert (code, output.rstrip().endswith(" tensors, all bitwise equal")) == (0, True)
    assert against(run_dir, out)[0] == int(dtype != torch.float32)


def test_other_types_and_numbers_too_large_for_one_are_refused(run_dir: Path, tmp_path: Path) -> None:
    code, output = export(run_dir, tmp_path / "out", "--dtype", "float8")
    assert (code, "float32" in output, "bfloat16" in output) == (2, True, True)
    code, output = export(run_dir, tmp_path / "out", "--dtype", "float16", "--format", "dist")
    assert (code, "--dtype float16 is for --format hf" in output) == (2, True)
    spec = ModelSpec.from_folder(tmp_path / "model")
    full = canonical_tensors(spec)
    full["model.norm.weight"][0] = 70000.0
    write_trainer_checkpoint(tmp_path / "large", spec, Parallel(), full)
    alone = ["export", "--checkpoint", str(tmp_path / "large"), "-c", str(tmp_path / "tiny.yaml"), "--dtype", "float16"]
    result = CliRunner().invoke(app, [*alone, "--out", str(tmp_path / "out")])
    assert (result.exit_code, "model.norm.weight has 70000, which is more than float16 holds" in result.output) == (
        2,
        True,
    )
    assert not (tmp_path / "out").exists()


def alone(checkpoint: Path, *options: str) -> tuple[int, str]:
    """Runs the command on a checkpoint's own folder. Returns: its exit code, and what it printed."""
    result = CliRunner().invoke(app, ["export", "--checkpoint", str(checkpoint), *options])
    return result.exit_code, result.output


@pytest.mark.parametrize("part", ["trainer", "."])
def test_a_checkpoint_that_lies_elsewhere_is_exported_with_a_configuration(
    run_dir: Path, tmp_path: Path, part: str
) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    shutil.copytree(step_folder(run_dir, 4) / part, copy)
    config = ("-c", str(tmp_path / "tiny.yaml"))
    code, output = alone(copy, *config, "--out", str(out))
    assert (code, output.startswith(f"checkpoint {copy} is in {out} (")) == (0, True), output
    assert same(load_file(out / "model.safetensors"), canonical_tensors(ModelSpec.from_folder(out), 4)) == []
    code, output = alone(copy, *config, "--test", str(out))
    assert (code, output.rstrip().endswith("all bitwise equal")) == (0, True), output
    code, output = alone(copy, "--out", str(out))
    assert (code, "give the configuration of its model with -c" in output) == (2, True)
    assert alone(step_folder(run_dir, 4) / part, "--test", str(out))[0] == 0  # the run's own lies above it
    shard = next(copy.rglob("shard-tp00-pp00.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    code, output = alone(copy, *config, "--out", str(out))
    assert (code, "shard-tp00-pp00.safetensors has other bytes" in output) == (2, True)


def test_an_imported_model_is_exported_as_it_was(tmp_path: Path) -> None:
    config, out = write_config(tmp_path), tmp_path / "tp2"
    imported = ["import", str(config), "--out", str(out), "--set", "trainer.tensor_parallel=2"]
    assert CliRunner().invoke(app, imported).exit_code == 0
    code, output = alone(out, "-c", str(config), "--test", str(tmp_path / "model"))
    assert (code, output.rstrip().endswith("all bitwise equal")) == (0, True), output


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("nowhere", "no such folder"),
        ("model", "is no checkpoint: it has neither complete.json nor meta.json"),
        ("last", "lies in no run's folder"),
        ("unfinished", "has no complete.json, so it was not finished"),
    ],
)
def test_what_is_no_checkpoint_is_said(run_dir: Path, tmp_path: Path, folder: str, says: str) -> None:
    shutil.copytree(step_folder(run_dir, 4), tmp_path / "unfinished")
    (tmp_path / "unfinished" / "complete.json").unlink()
    shutil.copytree(step_folder(run_dir, 4), tmp_path / "last")
    config = () if folder == "last" else ("-c", str(tmp_path / "tiny.yaml"))
    code, output = alone(tmp_path / folder, *config, "--out", str(tmp_path / "out"))
    assert (code, says in output) == (2, True), output
    code, output = alone(Path("last"), "--out", str(tmp_path / "out"))
    assert (code, "give the folder of a run, or a checkpoint's with --checkpoint DIR" in output) == (2, True)


def test_other_tensors_are_named(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "out")[0] == 0
    path = tmp_path / "out" / "model.safetensors"
    held = load_file(path) | {"model.norm.weight": torch.zeros(3), "more": torch.zeros(1)}
    del held["model.embed_tokens.weight"]
    save_file(held, path)
    code, output = against(run_dir, tmp_path / "out")
    assert code == 1
    for part in ("model.embed_tokens.weight is not in", "more is in", "model.norm.weight has shape ["):
        assert part in output
    path.unlink()
    code, output = against(run_dir, tmp_path / "out")
    assert (code, "has no *.safetensors file to compare with" in output) == (2, True)


def test_either_a_folder_to_write_or_one_to_compare_with_is_given(run_dir: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run_dir)])
    assert (result.exit_code, "give --out DIR to write, or --test DIR to compare" in result.output) == (2, True)
    assert export(run_dir, tmp_path / "out", "--test", str(tmp_path))[0] == 2
