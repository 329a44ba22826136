"""`make` offers what the documents show, and its targets select the tests that they promise."""

import re
import subprocess

import pytest

from tests.house.commands import commands_in, documents
from tests.house.repository import REPO

MAKE_TIMEOUT_S = 60.0


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=MAKE_TIMEOUT_S).stdout


def test_help_lists_every_target_that_the_documents_show() -> None:
    listed = set(re.findall(r"^  make (\S+)", make("help"), flags=re.MULTILINE))
    shown = {command.words[1] for path in documents() for command in commands_in(path) if command.words[0] == "make"}
    assert shown <= listed
    assert make() == make("help")


def test_gpu_check_leaves_the_environment_alone() -> None:
    """It runs in that of requirements/gpu.md: the CPU's venv laid over it would take its torch away."""
    assert "make_venv" not in make("--dry-run", "--always-make", "gpu-check")


def test_test_runs_the_checks_first() -> None:
    recipe = make("--dry-run", "--always-make", "test")
    steps = [
        "make_venv.sh",
        "ruff format",
        "ruff check",
        "mypy",
        "lint-imports",
        "buf lint",
        "buf breaking --against protos/wire.binpb",
        "tools.proto check",
        "pytest",
    ]
    places = [recipe.index(step) for step in steps]
    assert places == sorted(places)


@pytest.mark.runs("make test-fast", "make test-all")  # up to pytest itself
@pytest.mark.parametrize(
    ("target", "selection"),
    [
        ("test", "not slow) and not alone"),
        ("test", "not slow) and alone"),
        ("test-all", "slow or not slow) and alone"),
        ("test-fast", "not slow"),
    ],
)
def test_each_target_selects_its_tests(target: str, selection: str) -> None:
    assert selection in make("--dry-run", target)


def test_ci_calls_make_test() -> None:
    assert "\nmake test " in (REPO / ".ci" / "run").read_text(encoding="utf-8")
