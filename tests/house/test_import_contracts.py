"""The import contracts in pyproject.toml hold, and each of them can be broken."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, REPO

LINT = Path(sys.executable).parent / "lint-imports"
LINT_TIMEOUT_S = 120.0


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINT), "--no-logo", "--no-cache"]
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LINT_TIMEOUT_S, check=False
    )


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """A tree with our packages, empty, and the files that the contracts name, importing what they may."""
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    allowed = {f"{package}/__init__.py": "" for package in (*PACKAGES, "tandem_api")}
    allowed |= {
        "trainer_service/megatron_engine/__init__.py": "import megatron.core",
        "trainer_service/megatron_engine/model.py": "from megatron.core.models import gpt",
        "trainer_service/app.py": "import trainer_service.megatron_engine.model\nimport weightsync, torch",
        "rollout_service/sglang_engine/plugin.py": "import sglang.srt.plugins",
        "rollout_service/sglang_engine/__init__.py": "",
        "rollout_service/sglang_cpu/__init__.py": "import sglang",
        "rollout_service/app.py": "import rollout_service.sglang_engine.plugin\nimport servicekit.registry",
        "servicekit/registry.py": "import redis.asyncio",
        "weightsync/rendezvous.py": "import redis",
        "launcher/embedded_redis.py": "import redis",
        "coordinator/app.py": "import tandem_config, servicekit, tandem_api",
    }
    for name, source in allowed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source + "\n")
    return tmp_path


def test_what_the_house_allows_is_allowed(skeleton: Path) -> None:
    done = lint(skeleton)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "source", "broken"),
    [
        ("trainer_service/x.py", "import coordinator.app", "Services never import each other"),
        ("rollout_service/x.py", "import trainer_service", "Services never import each other"),
        ("weightsync/x.py", "import rollout_service", "Shared packages do not know the services"),
        ("coordinator/x.py", "import launcher", "Services do not import the launcher"),
        ("servicekit/x.py", "import tandem_config", "servicekit knows nothing of weights or configuration"),
        ("coordinator/x.py", "def f():\n    import torch", "never loads an engine or torch"),
        ("weightsync/__init__.py", "import torch\nimport servicekit", None),
        ("trainer_service/loss.py", "from megatron.core import mpu", "Megatron is imported in"),
        ("rollout_service/engine.py", "import sglang", "SGLang is imported in"),
        ("coordinator/x.py", "import redis", "Redis is spoken in"),
    ],
)
def test_a_broken_rule_is_found(skeleton: Path, name: str, source: str, broken: str | None) -> None:
    (skeleton / name).write_text(source + "\n")
    done = lint(skeleton)
    verdicts = [line for line in done.stdout.splitlines() if "BROKEN" in line]
    if broken is None:
        assert verdicts == []
    else:
        assert done.returncode == 1
        assert any(broken in line for line in verdicts), done.stdout


def test_torch_behind_another_package_is_found(skeleton: Path) -> None:
    (skeleton / "weightsync/session.py").write_text("import torch\n")
    (skeleton / "coordinator/weights.py").write_text("import weightsync.session\n")
    assert "weightsync.session -> torch" in lint(skeleton).stdout
