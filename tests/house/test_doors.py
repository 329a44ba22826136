"""Nothing on the coordinator's side loads torch or an engine, whatever imports whatever."""

import subprocess
import sys

import pytest

from tests.house.repository import REPO

FORBIDDEN = ("torch", "transformers", "megatron", "sglang")
IMPORT_TIMEOUT_S = 120.0


def loaded_by(module: str) -> set[str]:
    """Returns the top-level packages that a fresh interpreter has loaded after importing `module`."""
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "coordinator.app",
        "coordinator.__main__",
        "servicekit.rpc.server",
        "servicekit.redis.registry",
        "tandem_config.loading",
        "launcher.cli",
        "reward_service",
        "environment_service.serve",
    ],
)
def test_importing_it_loads_no_engine(module: str) -> None:
    assert loaded_by(module).isdisjoint(FORBIDDEN)


def test_the_check_can_fail() -> None:
    assert "torch" in loaded_by("torch")
