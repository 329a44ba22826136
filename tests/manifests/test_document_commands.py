"""Real kubectl reads the commands of the documents: options, files, kustomizations, up to the missing cluster."""

import base64
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.commands import documents, lines_in
from tests.house.repository import REPO
from tests.manifests.kustomize import DEPLOY, OVERLAYS, kubectl, label, overlay, templates_of

pytestmark = pytest.mark.integration
LINES = list(dict.fromkeys(line for document in documents() for line in lines_in(document)))
PAGE = (REPO / "docs" / "kubernetes.md").read_text(encoding="utf-8")
PREPARE = [line for line in LINES if line.startswith("export ")]
# One command of several parts, which makes the Secret of Redis and applies it.
(SECRET,) = [line for line in LINES if "servicekit.redis.acl" in line and "kubectl" in line]
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
    for name in ("Qwen2.5-7B", "data"):
        (tmp_path / name).touch()
    # The kustomizations that the page shows, under the names that it gives them.
    for path, text in re.findall(r"^```yaml\n# (\S+/kustomization\.yaml)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def run(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder), "PATH": paths, "PYTHONPATH": str(REPO)}
    bash = ["bash", "-e", "-o", "pipefail", "-c", command]
    return subprocess.run(
        bash, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.runs("kubectl")
@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("kubectl ")])
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
    """Up to the missing cluster; tests/unit/servicekit has it run without what is installed."""
    done = run("\n".join([*PREPARE, SECRET]), folder)
    assert done.returncode == 1, done.stderr
    assert "connection refused" in done.stderr
    made = yaml.safe_load((folder / "redis-auth.yaml").read_text(encoding="utf-8"))
    assert (made["kind"], made["metadata"]["name"]) == ("Secret", "redis-auth")
    assert set(made["data"]) == {"url", "password", "users.acl"}
    assert b"user tandem on #" in base64.b64decode(made["data"]["users.acl"])


def test_the_secret_is_not_made_of_what_failed(folder: Path) -> None:
    """Without a password: an empty users.acl would let nobody in, and the Job would fail for good."""
    # In a shell of its own, which does not end at a failure, as a person's does not.
    done = run(f"unset TANDEM_REDIS_PASSWORD; bash -c {shlex.quote(SECRET)}", folder)
    assert done.returncode == 2
    assert "TANDEM_REDIS_PASSWORD" in done.stderr
    assert not (folder / "redis-auth.yaml").exists()


def test_the_claims_are_of_the_class_that_the_page_names(folder: Path) -> None:
    done = run("kubectl kustomize my-storage", folder)
    assert done.returncode == 0, done.stderr
    claims = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(done.stdout)}
    assert {name: spec["storageClassName"] for name, spec in claims.items()} == dict.fromkeys(
        ("run", "models"), "filestore-rwx"
    )
    assert claims["models"]["resources"]["requests"]["storage"] == "600Gi"


def test_existing_claims_are_taken_as_the_page_says(folder: Path) -> None:
    """The patch that it shows, on every overlay, after components that add volumes."""
    (patch,) = [each for each in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "shared-models" in each]
    components = [f"../deploy/components/{name}" for name in ("names", "mtls")]
    for name in ("cluster", "single-node-gpu"):
        (folder / name).mkdir()
        text = yaml.safe_dump({"resources": [f"../deploy/overlays/{name}"], "components": components}) + patch
        (folder / name / "kustomization.yaml").write_text(text, encoding="utf-8")
        done = run(f"kubectl kustomize {name}", folder)
        assert done.returncode == 0, done.stderr
        manifests = list(yaml.safe_load_all(done.stdout))
        for service in ("coordinator", "trainer", "rollout"):
            for template in templates_of(manifests, service):
                volumes = {each["name"]: each for each in template["spec"]["volumes"]}
                assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "shared-models"
                assert len(volumes) == len(template["spec"]["volumes"])
