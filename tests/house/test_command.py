"""The installed `tandem` command works from any directory, on the example that the repository ships."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.repository import REPO

TANDEM = Path(sys.executable).parent / "tandem"
EXAMPLE = REPO / "examples" / "arithmetic" / "arithmetic.yaml"
COMMAND_TIMEOUT_S = 120.0


def tandem(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TANDEM, *arguments], cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )


@pytest.mark.runs("tandem check")
def test_the_example_configuration_has_no_problems(tmp_path: Path) -> None:
    done = tandem("check", "-c", str(EXAMPLE), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_misspelt_key_is_named_with_a_suggestion(tmp_path: Path) -> None:
    done = tandem("check", "-c", str(EXAMPLE), "--set", "grpo.groupsize=8", folder=tmp_path)
    assert done.returncode == 2
    assert "groupsize" in done.stdout + done.stderr
    assert "group_size" in done.stdout + done.stderr


@pytest.mark.parametrize("command", [(), ("demo",), ("run",), ("check",), ("status",)])
def test_help_is_printed(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = tandem(*command, "--help", folder=tmp_path)
    assert done.returncode == 0
    assert "Usage: tandem" in done.stdout


def test_the_versions_of_the_engines_are_printed(tmp_path: Path) -> None:
    done = tandem("version", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "megatron" in done.stdout
    assert "sglang" in done.stdout
