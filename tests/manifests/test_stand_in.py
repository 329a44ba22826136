"""Real kubectl against the stand-in for the API server (tests/fakes/fake_kube_api: a fake, no cluster is behind it)."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fake_kube_api import FakeKubeApi
from tests.house.commands import BLOCK, block_lines
from tests.house.repository import REPO
from tests.manifests.kustomize import DEPLOY, OVERLAYS, VARIANTS, combine, kubectl

pytestmark = pytest.mark.integration
DOCUMENT = REPO / "docs" / "kubernetes.md"
# What the stand-in can answer. The other commands of the document need pods that run.
ANSWERED = ("apply", "create", "delete", "get", "label", "scale")
TIMEOUT_S = 60.0


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """kubectl's environment: the stand-in is its cluster."""
    kubectl()
    with FakeKubeApi("monitoring") as api:
        api.write_kubeconfig(tmp_path / "kubeconfig", "default")
        paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield os.environ | {"KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path), "PATH": paths}


def run(command: str, environ: dict[str, str], folder: Path = REPO) -> str:
    """Output of a shell command. Raises: AssertionError: it failed."""
    answer = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert answer.returncode == 0, f"{command}\n{answer.stdout[-1000:]}\n{answer.stderr[-2000:]}"
    return answer.stdout


@pytest.mark.parametrize("name", [*OVERLAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS)])
def test_the_server_accepts_it(name: str, environ: dict[str, str]) -> None:
    run("kubectl apply -f deploy/base/namespace.yaml", environ)
    with tempfile.TemporaryDirectory() as folder:
        path = DEPLOY / "overlays" / name
        if name in VARIANTS:
            combine(Path(folder), *VARIANTS[name])
            path = Path(folder)
        said = run(f"kubectl apply --server-side --dry-run=server -k {shlex.quote(str(path))}", environ)
    assert "job.batch/coordinator serverside-applied (server dry run)" in said


def document_commands() -> list[str]:
    """The document's commands that the stand-in can answer, and those of ours that prepare them."""
    blocks = BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))
    lines = [line for language, text in blocks for line in block_lines(language, text)]
    prepared = ("export ", "python ", *(f"kubectl {verb} " for verb in ANSWERED))
    return [line for line in lines if line.startswith(prepared)]


@pytest.mark.slow
def test_the_documents_commands_work(environ: dict[str, str], tmp_path: Path) -> None:
    """In their order; what removes the run comes last here, and the laptop's is a run of its own."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    environ["PYTHONPATH"] = str(REPO)
    removes = "kubectl delete -k deploy/"
    commands = [each for each in document_commands() if each != removes and "overlays/" not in each]
    assert sum(command.startswith("kubectl") for command in commands) >= 15
    said = run("set -e -o pipefail\n" + "\n".join([*commands, removes]), environ, tmp_path)
    for line in (
        "secret/redis-auth serverside-applied",
        "persistentvolumeclaim/models created",
        "statefulset.apps/trainer created",
        "statefulset.apps/rollout scaled",
        'job.batch "coordinator" deleted',
        "namespace/monitoring labeled",
        'namespace "tandem" deleted',
    ):
        assert line in said


def test_the_laptops_command_works(environ: dict[str, str]) -> None:
    (command,) = [each for each in document_commands() if "overlays/" in each]
    assert "job.batch/coordinator created" in run(command, environ)
