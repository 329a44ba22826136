"""The repository keeps its budget: lines, closets, the two paths that a reader follows, the subjects of commits."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.repository import GIT_TIMEOUT_S, REPO
from tools import budget
from tools.budget import Figure

needs_git = pytest.mark.skipif(not (REPO / ".git").exists(), reason="no .git: files and commits cannot be listed")
LIST = "# Code\n\n## The path of a prompt\n\nText.\n\n```\na.py\nb.py\n```\n\n## The path of a weight\n\nNo list.\n"


@needs_git
@pytest.mark.parametrize("measure", budget.FIGURES, ids=lambda measure: measure.__name__)
def test_it_fits(measure: Callable[[], Figure]) -> None:
    """Where it does not: take away as much as was added, merge, or raise the limit in a commit that says why."""
    figure = measure()
    assert figure.fits, str(figure)


@needs_git
def test_the_command_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert budget.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(budget.FIGURES)


def test_files_of_a_path_are_counted_and_exist(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/code-paths.md").write_text("# Code\n")
    (tmp_path / "ARCHITECTURE.md").write_text(LIST)
    (tmp_path / "a.py").write_text("1\n2\n")
    (tmp_path / "b.py").write_text("3\n")
    assert (budget.prompt_path(tmp_path).size, budget.prompt_path(tmp_path).fits) == (3, True)
    (tmp_path / "b.py").unlink()
    figure = budget.prompt_path(tmp_path)
    assert (figure.size, figure.wrong, figure.fits) == (2, ["ARCHITECTURE.md: b.py does not exist"], False)
    with pytest.raises(ValueError, match="The path of a weight"):
        budget.weight_path(tmp_path)


def test_a_size_beyond_its_limit_does_not_fit() -> None:
    assert Figure(name="it", size=2, limit=2).fits
    assert not Figure(name="it", size=3, limit=2).fits


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.com", *arguments]
    subprocess.run(command, cwd=folder, check=True, timeout=GIT_TIMEOUT_S, capture_output=True)


def test_a_long_subject_is_found_in_the_commits_after_the_rule(tmp_path: Path) -> None:
    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    (whole / "tests/house").mkdir(parents=True)
    git(whole, "init", "-q")
    git(whole, "commit", "-q", "--allow-empty", "-m", "x" * 100)
    assert budget.commit_subject(whole).fits
    (whole / "tests/house/test_budget.py").write_text("")
    git(whole, "add", ".")
    git(whole, "commit", "-q", "-m", "y" * 90)
    git(whole, "commit", "-q", "--allow-empty", "-m", "z" * 72)
    assert (budget.commit_subject(whole).size, budget.commit_subject(whole).fits) == (72, True)
    git(whole, "commit", "-q", "--allow-empty", "-m", "z" * 73)
    git(tmp_path, "clone", "-q", "--depth=2", f"file://{whole}", "shallow")
    for clone in (whole, shallow):
        (wrong,) = budget.commit_subject(clone).wrong
        assert wrong.endswith(" " + "z" * 73)
