"""`tandem deploy` as users meet it: the command line in this process, real kubectl, a fake cluster."""

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from launcher.cli import app
from launcher.deploy.overlay import kustomize
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.s3_server import S3Server, s3_server
from tests.house.repository import REPO
from tests.manifests.kustomize import kubectl

RUN: dict[str, dict[str, Any]] = {
    "run": {"name": "math", "iterations": 3},
    "model": {"path": "/models/Qwen2.5-7B", "dtype": "bfloat16"},
    "data": {"train": "/models/data/train.jsonl", "heldout": "/models/data/heldout.jsonl"},
    "reward": {"kind": "math_verify"},
    "trainer": {"tensor_parallel": 4, "data_parallel": 4},
    "rollout": {"replicas": 3, "tensor_parallel": 2},
    "fleet": {"kind": "kubernetes"},
}
ANSWERS = ("-n", "team", "-r", "registry.example.com/lab", "--gpus-per-node", "8")


_run_command = kustomize._run
_built: dict[str, "subprocess.CompletedProcess[str]"] = {}


def run_once(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Build with the real kubectl, and remember it by the content of all files: most tests build what others have."""
    target = Path(command[-1]).absolute()
    root = next((root for root in (folder, REPO) if target.is_relative_to(root)), None)
    if command[1] != "kustomize" or root is None:
        return _run_command(command)
    top = root / target.relative_to(root).parts[0]
    content = hashlib.sha256(str(target.relative_to(top)).encode())
    for file in sorted(top.rglob("*")):
        content.update(f"\0{file.relative_to(top)}\0".encode() + (file.read_bytes() if file.is_file() else b""))
    answer = _built.get(content.hexdigest()) or _run_command(command)
    if answer.returncode == 0:
        _built[content.hexdigest()] = answer
    return answer


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    text: str


Deploy = Callable[..., Done]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    """A cluster with the namespace `team`, two nodes of 8 GPUs, and the claims and the Secret of the documents."""
    with FakeCluster("default", "team") as fake:
        for name in ("gpu-a", "gpu-b", "gpu-c"):
            fake.node(name, 8, "nvidia.com/gpu:NoSchedule", pool="gpu")
        fake.node("cpu-a", 0)
        (tmp_path / "volume").mkdir()
        fake.claim("run", "team", "ReadWriteMany", folder=tmp_path / "volume")
        fake.claim("models", "team", "ReadWriteMany", folder=tmp_path / "volume")
        head = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "redis-auth", "namespace": "team"}}
        fake.put({**head, "data": {"url": "eA==", "password": "eA==", "users.acl": "eA=="}})
        head = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "kube-dns", "namespace": "kube-system"}}
        fake.put({**head, "spec": {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"]}})
        yield fake


@pytest.fixture
def storage() -> Iterator[S3Server]:
    """S3-compatible storage, empty."""
    with s3_server() as server:
        yield server


@pytest.fixture
def deploy(cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deploy:
    """Run `tandem deploy ...` against the fake cluster."""
    kubectl()
    monkeypatch.setattr(kustomize, "_run", lambda command: run_once(command, tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path / "kubeconfig", "team")))
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    # The fake answers within milliseconds.
    monkeypatch.setattr("launcher.deploy.running.logs.FOLLOW_S", 0.05)
    monkeypatch.setattr("launcher.deploy.running_commands._LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr("launcher.deploy.results.helper_pod._LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr("launcher.deploy.results.fetch._LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr("launcher.view.status._ANSWER_S", 3.0)

    def invoke(*arguments: str, answer: str | None = None) -> Done:
        result = CliRunner().invoke(app, ["deploy", *arguments], input=answer)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.output)

    return invoke


def write_run(folder: Path, **sections: dict[str, Any]) -> Path:
    """A run's YAML, with some settings changed."""
    values = {name: {**RUN.get(name, {}), **sections.get(name, {})} for name in {**RUN, **sections}}
    file = folder / "my.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return file
