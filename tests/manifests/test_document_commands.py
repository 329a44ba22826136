"""Real kubectl reads the commands of the documents: options, files, kustomizations, up to the missing cluster."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.commands import documents, lines_in
from tests.house.repository import REPO
from tests.manifests.kustomize import DEPLOY, OVERLAYS, kubectl, label, overlay

pytestmark = pytest.mark.integration
LINES = list(dict.fromkeys(line for document in documents() for line in lines_in(document)))
PREPARE = [line for line in LINES if line.startswith(("export ", "python -m servicekit.redis.acl"))]
OFFLINE = "--dry-run=client"
TIMEOUT_S = 120.0
KUBECONFIG = """
current-context: none
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a reader: our manifests, and what the commands of the page take or have made before."""
    kubectl()
    (tmp_path / "kubeconfig").write_text(KUBECONFIG, encoding="utf-8")
    (tmp_path / "deploy").symlink_to(DEPLOY)
    (tmp_path / "redis-auth.yaml").write_text("apiVersion: v1\nkind: Secret\nmetadata: {name: redis-auth}\n")
    for name in ("Qwen2.5-7B", "data", "users.acl"):
        (tmp_path / name).touch()
    return tmp_path


def run(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder), "PATH": paths, "PYTHONPATH": str(REPO)}
    bash = ["bash", "-e", "-o", "pipefail", "-c", command]
    return subprocess.run(
        bash, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.runs("kubectl")
@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("kubectl ") and OFFLINE not in line])
def test_all_that_it_lacks_is_a_cluster(line: str, folder: Path) -> None:
    done = run(line, folder)
    assert done.returncode == 1, done.stdout
    assert re.search(r"connection refused|connection to the server \S+ was refused", done.stderr), done.stderr


def test_the_objects_that_they_name_are_in_the_manifests() -> None:
    made = {label(each).lower() for name in OVERLAYS for each in overlay(name)} | {"pod/shell"}
    kinds = "|".join({name.partition("/")[0] for name in made})
    named = {name for line in LINES if line.startswith("kubectl ") for name in re.findall(rf" ((?:{kinds})/\S+)", line)}
    assert len(named) >= 5
    assert named <= made


@pytest.mark.runs("python -m servicekit.redis.acl")
def test_the_secret_of_redis_is_made_as_the_page_says(folder: Path) -> None:
    (secret,) = [line for line in LINES if OFFLINE in line]
    done = run("\n".join([*PREPARE, secret]), folder)
    assert done.returncode == 0, done.stderr
    made = yaml.safe_load((folder / "redis-auth.yaml").read_text(encoding="utf-8"))
    assert (made["kind"], made["metadata"]["name"], set(made["data"])) == ("Secret", "redis-auth", {"url", "users.acl"})
