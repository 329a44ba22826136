"""`tandem profile`: the table of a profiled step, which rank and step it shows, and what it says when there is none."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from tandem_files.profiles.folder import Operator, RankProfile, step_folder, table_path, write_profile


def profiled(run_dir: Path, step: int, rank: int, compute_s: float) -> None:
    step_folder(run_dir, step).mkdir(parents=True, exist_ok=True)
    write_profile(
        run_dir,
        RankProfile(
            step=step,
            rank=rank,
            world_size=4,
            timeline="cuda",
            seconds=3.0,
            recorded_s=2.0,
            compute_s=compute_s,
            communication_s=0.5,
            exposed_s=0.25,
            idle_s=0.125,
            parts={"pack": 0.02, "forward_backward": 1.5},
            operators=(Operator(name="gemm", calls=7, seconds=0.75), Operator(name="x" * 80, calls=1, seconds=0.5)),
        ),
    )


def shown(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "300"})
    return result.exit_code, [" ".join(line.split()) for line in result.output.splitlines()]


@pytest.mark.runs("tandem profile")
def test_the_last_step_and_its_busiest_rank_are_shown(tmp_path: Path) -> None:
    for step, rank, compute_s in ((2, 0, 1.0), (9, 0, 1.0), (9, 1, 1.25)):
        profiled(tmp_path, step, rank, compute_s)
    code, lines = shown(str(tmp_path))
    assert code == 0
    assert lines[0].endswith(": step 9, 2 of 4 ranks, the GPU's kernels")
    assert lines[1:4] == [
        "rank seconds recorded computing communication of it alone neither",
        "0 3.000 2.000 50.0% 25.0% 12.5% 6.2%",
        "1 3.000 2.000 62.5% 25.0% 12.5% 6.2%",
    ]
    assert "part of rank 1's step seconds share" in lines
    assert "forward_backward 1.500 50.0%" in lines
    assert "gemm 7 0.7500 37.5%" in lines
    assert f"{'x' * 47}\N{HORIZONTAL ELLIPSIS} 1 0.5000 25.0%" in lines
    assert "rank-001.trace.json.gz" in lines[-1]
    assert shown(str(tmp_path), "--rank", "0", "--top", "1")[1][-2] == "gemm 7 0.7500 37.5%"
    assert shown(str(tmp_path), "--step", "2")[1][0].endswith("step 2, 1 of 4 ranks, the GPU's kernels")


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    assert shown(str(tmp_path)) == (2, [f"{tmp_path} has no profiled step; run it with `--set profile.steps=1`"])
    assert "does not exist; give a run's folder" in shown(str(tmp_path / "gone"))[1][0]
    profiled(tmp_path, 2, 0, 1.0)
    assert "step 3 of" in shown(str(tmp_path), "--step", "3")[1][0]
    assert shown(str(tmp_path), "--rank", "5")[1] == ["rank 5 was not profiled in step 2; ranks with a profile: 0"]
    table_path(tmp_path, 2, 0).write_text('{"step": 2}')
    code, lines = shown(str(tmp_path))
    assert (code, "rank-000.json is no table of a profiled step" in lines[0]) == (2, True)
