"""The import contracts in pyproject.toml hold, and each of them can be broken."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, REPO

LINT = Path(sys.executable).parent / "lint-imports"
LINT_TIMEOUT_S = 120.0
IMPORTED = re.compile(r"(?:import|from) ([\w.]+)")
# More in one folder than this, and a newcomer cannot see which neighbours belong together.
MAX_MODULES = 12


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINT), "--no-logo", "--no-cache"]
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LINT_TIMEOUT_S, check=False
    )


def broken_in(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if "BROKEN" in line]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of our packages, to break."""
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    for package in (*PACKAGES, "tandem_api"):
        for file in (REPO / package).rglob("*.py"):
            copy = tmp_path / file.relative_to(REPO)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    return tmp_path


def test_our_packages_keep_the_contracts(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout + done.stderr


# Of a file: what it may not import, and the contract that says so.
FORBIDDEN = [
    ("trainer_service/worker.py", "import coordinator.app", "Services never import each other"),
    ("rollout_service/servicer.py", "import trainer_service", "Services never import each other"),
    ("weightsync/plans/plan.py", "import rollout_service", "Shared packages do not know the services"),
    ("coordinator/run.py", "import launcher", "Services do not import the launcher"),
    ("servicekit/logs.py", "import tandem_config", "servicekit knows nothing of weights, files or configuration"),
    ("servicekit/logs.py", "import tandem_files", "servicekit knows nothing of weights, files or configuration"),
    ("weightsync/transfer/session.py", "import tandem_config", "weightsync and tandem_files know nothing of the"),
    ("tandem_files/digests.py", "import weightsync", "tandem_files knows nothing of weight sync"),
    ("coordinator/run.py", "import environment_service", "environment_service is imported by nothing of ours"),
    ("environment_service/servicer.py", "import coordinator.run", "stands on the coordinator's episodes and on no"),
    ("environment_service/servicer.py", "import environment_service.serve", "environment_service: no import runs"),
    ("weightsync/plans/cost.py", "import torch", "weightsync need no torch"),
    (
        "weightsync/membership/rendezvous.py",
        "import weightsync.transfer.session",
        "weightsync: no import runs back up",
    ),
    ("coordinator/run.py", "def f():\n    import torch", "never loads an engine or torch"),
    ("trainer_service/objectives/clipping.py", "from megatron.core import mpu", "Megatron is imported in"),
    ("rollout_service/engine.py", "import sglang", "SGLang is imported in"),
    ("coordinator/run.py", "import redis", "Redis is spoken in"),
    ("coordinator/run.py", "import kubernetes", "The Kubernetes client is imported in"),
    (
        "coordinator/watch/metrics.py",
        "import coordinator.sync.weight_sync",
        "coordinator: no import runs back up",
    ),
    ("tandem_clients/trainer.py", "import coordinator.leader_lease", "Shared packages do not know the services"),
    ("tandem_clients/flow.py", "import tandem_clients.replica", "tandem_clients: no import runs back up"),
    ("launcher/view/top.py", "import launcher.run.run", "launcher: no import runs back up"),
    ("servicekit/redis/client.py", "import servicekit.rpc.server", "servicekit: no import runs back up"),
    (
        "trainer_service/micro_batches/cuts.py",
        "import trainer_service.engine",
        "trainer_service: no import runs back up",
    ),
    ("rollout_service/engine.py", "import rollout_service.app", "rollout_service: no import runs back up"),
    ("tandem_config/schema.py", "import tandem_config.loading", "tandem_config: no import runs back up"),
]


def test_every_broken_rule_is_found(tree: Path) -> None:
    """All are broken together, as one check takes as long as any; each import is named under its contract."""
    for name, source, _ in FORBIDDEN:
        with (tree / name).open("a", encoding="utf-8") as file:
            file.write(source + "\n")
    done = lint(tree)
    assert done.returncode == 1
    details = done.stdout.partition("Broken contracts")[2]
    for name, source, contract in FORBIDDEN:
        assert any(contract in line for line in broken_in(done)), contract
        importer, (imported, *_) = name.removesuffix(".py").replace("/", "."), IMPORTED.findall(source)
        # Of what is not ours the package is named.
        shown = imported if imported.startswith(PACKAGES) else imported.partition(".")[0]
        assert f"{importer} -> {shown} " in details, (name, source)


def test_what_may_be_imported_breaks_nothing(tree: Path) -> None:
    with (tree / "weightsync/transfer/session.py").open("a", encoding="utf-8") as file:
        file.write("import torch, servicekit.errors\n")
    assert broken_in(lint(tree)) == []


def test_torch_behind_another_package_is_found(tree: Path) -> None:
    with (tree / "coordinator/sync/weight_sync.py").open("a", encoding="utf-8") as file:
        file.write("import weightsync.transfer.session\n")
    assert "weightsync.transfer.session -> torch" in lint(tree).stdout


@pytest.mark.parametrize("package", ["coordinator", "weightsync", "launcher", "servicekit", "rollout_service"])
def test_a_module_without_a_layer_is_found(tree: Path, package: str) -> None:
    (tree / package / "odds.py").write_text('"""A new idea."""\n', encoding="utf-8")
    done = lint(tree)
    assert done.returncode == 1
    assert f"{package}.odds" in done.stdout + done.stderr, done.stdout + done.stderr


def test_no_folder_holds_more_than_a_dozen_modules() -> None:
    tops = (*PACKAGES, "tools", "tests/kit")
    modules = [file for top in tops for file in (REPO / top).rglob("*.py") if file.stem != "__init__"]
    counts = Counter(file.parent.relative_to(REPO).as_posix() for file in modules)
    full = {folder: count for folder, count in counts.items() if count > MAX_MODULES}
    assert full == {}, "find the ideas in it, a folder each"
