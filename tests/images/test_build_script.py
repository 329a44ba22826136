"""deploy/images/build.sh names, pushes and prints images as a kustomization takes them; Docker is a recorder here."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.house.repository import REPO
from tests.manifests.kustomize import DEPLOY, build, containers, pod_templates

SCRIPT = REPO / "deploy" / "images" / "build.sh"
SCRIPT_S = 60.0
REGISTRY = "registry.example.com/team"
# Writes down what it is asked; `image inspect` has digests in two registries, as of an image that was pushed twice.
RECORDER = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/asked"
case "$1" in
  build) echo "a line of the build" ;;
  image)
    echo "other.example.com/tandem@sha256:$(printf other | sha256sum | cut -c1-64)"
    echo "${5%:*}@sha256:$(printf %s "$5" | sha256sum | cut -c1-64)" ;;
esac
"""


def run(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    docker = folder / "docker"
    docker.write_text(RECORDER, encoding="utf-8")
    docker.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("VARIANT", "REGISTRY", "PUSH")}
    return subprocess.run(
        [SCRIPT], env={**kept, "DOCKER": str(docker), **settings}, capture_output=True, text=True, timeout=SCRIPT_S
    )


def asked(folder: Path, word: str) -> list[str]:
    lines = (folder / "asked").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(word)]


def test_without_settings_names_are_of_no_registry_and_nothing_is_pushed(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(asked(tmp_path, "build")) == 3
    assert all("--tag registry.invalid/tandem/" in line for line in asked(tmp_path, "build"))
    assert not asked(tmp_path, "push")
    assert {each["name"] for each in yaml.safe_load(done.stdout)["images"]} == {
        f"registry.invalid/tandem/{name}" for name in ("coordinator", "trainer", "rollout")
    }


@pytest.mark.parametrize(("overlay", "variant"), [("cluster", "gpu"), ("dev-cpu", "cpu")])
def test_a_kustomization_runs_what_was_pushed(tmp_path: Path, overlay: str, variant: str) -> None:
    """What is printed, under a real kubectl: every pod of ours has the digest of its image."""
    done = run(tmp_path, REGISTRY=REGISTRY, VARIANT=variant, PUSH="1")
    assert done.returncode == 0, done.stderr
    assert len(asked(tmp_path, f"push {REGISTRY}/tandem/")) == 3
    base = os.path.relpath(DEPLOY / "overlays" / overlay, tmp_path.resolve())
    text = f"resources: [{base}]\n{done.stdout}"
    (tmp_path / "kustomization.yaml").write_text(text, encoding="utf-8")
    images = {each["image"] for pod in pod_templates(build(tmp_path)).values() for each in containers(pod)}
    ours = {image for image in images if "tandem" in image}
    assert len(ours) == 3
    assert all(image.startswith(f"{REGISTRY}/tandem/") and "@sha256:" in image for image in ours), ours
    assert len({image.partition("@")[2] for image in ours}) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"PUSH": "1"}, "PUSH=1 needs REGISTRY"),
        ({"PUSH": "yes"}, "PUSH=yes"),
        ({"REGISTRY": "acme"}, "REGISTRY=acme: the host of a registry"),
        ({"REGISTRY": "https://registry.example.com"}, "the host of a registry"),
        ({"VARIANT": "tpu"}, "VARIANT=tpu"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    done = run(tmp_path, **settings)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""
