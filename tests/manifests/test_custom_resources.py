"""Custom resources: against their published schemas where a package has them, else field by field.

cert-manager and the Prometheus operator have their schemas in npm packages: the slow test installs and uses those.
JobSet and Kueue have none in a registry: the Job inside a JobSet is validated as the Job that it is, and the rest of
their fields is compared with lists: JobSet v1alpha2's read off its CRD, Kueue v1beta1's in part from memory.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.manifests.kustomize import VARIANTS, Manifest, kinds, overlay
from tests.manifests.schemas import VERSIONS, is_custom, problems

PUBLISHED = {
    "cert-manager.io/v1": "@kubernetes-models/cert-manager/cert-manager.io/v1",
    "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
}
PACKAGES = ("@kubernetes-models/cert-manager@6.0.0", "@kubernetes-models/prometheus-operator@6.0.0", "typescript@5.9.3")
# Fields of spec, and of what is one level below it.
FIELDS = {
    "JobSet": {
        "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
        "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
        "replicatedJobs": {"name", "replicas", "template", "dependsOn", "groupName"},
        "successPolicy": {"operator", "targetReplicatedJobs"},
    },
    "ResourceFlavor": {"nodeLabels": None, "nodeTaints": None, "tolerations": None},
    "ClusterQueue": {
        "namespaceSelector": {"matchLabels", "matchExpressions"},
        "queueingStrategy": None,
        "resourceGroups": {"coveredResources", "flavors"},
    },
    "LocalQueue": {"clusterQueue": None},
}
INSTALL_S, CHECK_S = 240.0, 120.0
NODE = Path(__file__).parent / "node"


def custom_resources() -> list[Manifest]:
    return [each for name in VARIANTS for each in overlay(name) if is_custom(each)]


def test_each_kind_is_checked_somewhere() -> None:
    for each in custom_resources():
        assert each["apiVersion"] in PUBLISHED or each["kind"] in FIELDS, each["kind"]


def test_fields_are_known_to_the_project() -> None:
    for each in custom_resources():
        for field, value in each["spec"].items() if each["kind"] in FIELDS else ():
            known = FIELDS[each["kind"]]
            assert field in known, f"{each['kind']}.spec.{field}"
            for part in value if isinstance(value, list) else [value]:
                below = known[field]
                assert below is None or set(part) <= below, f"{each['kind']}.spec.{field}"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_inside_a_jobset_is_a_job(version: str) -> None:
    (jobset,) = kinds(overlay("cluster + all"), "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inside"}, **replicated["template"]}
    assert problems(job, version) == []


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages installed. Skips, loudly, where they cannot be."""
    if shutil.which("npm") is None:
        pytest.skip("NO NPM: custom resources were not checked against their published schemas")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text("{}")
    shutil.copy(NODE / "validate.mjs", folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
    if answer.returncode != 0:
        pytest.skip(f"NO NPM PACKAGES: custom resources were not checked against their schemas: {answer.stderr[-300:]}")
    return folder


def published() -> list[Manifest]:
    found = [each for each in custom_resources() if each["apiVersion"] in PUBLISHED]
    assert {each["kind"] for each in found} == {"Certificate", "Issuer", "PodMonitor", "PrometheusRule"}
    return found


def wrong_values(folder: Path, manifests: list[Manifest]) -> list[str]:
    """What the schemas say of values, and of what is missing."""
    command = ["node", "validate.mjs"]
    answer = subprocess.run(
        command, cwd=folder, input=json.dumps(manifests), capture_output=True, text=True, check=True, timeout=CHECK_S
    )
    return list(json.loads(answer.stdout))


def unknown_fields(folder: Path, manifests: list[Manifest]) -> list[str]:
    """What TypeScript says of the objects as literals of the published types: they may have no other fields."""
    lines = [
        f'const object{i}: import("{PUBLISHED[each["apiVersion"]]}").I{each["kind"]} = {json.dumps(each)};'
        for i, each in enumerate(manifests)
    ]
    (folder / "objects.ts").write_text("\n".join(lines))
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext"]
    command = [str(folder / "node_modules" / ".bin" / "tsc"), *flags, "objects.ts"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CHECK_S).stdout.splitlines()


@pytest.mark.slow
def test_published_schemas_accept_ours(node_folder: Path) -> None:
    assert wrong_values(node_folder, published()) == []
    assert unknown_fields(node_folder, published()) == []


@pytest.mark.slow
def test_published_schemas_find_a_mistake(node_folder: Path) -> None:
    broken = json.loads(json.dumps(published()[0]))
    del broken["spec"]["secretName"]
    assert "secretName" in wrong_values(node_folder, [broken])[0]
    broken = json.loads(json.dumps(published()[0]))
    broken["spec"]["secretname"] = "x"
    assert "secretname" in unknown_fields(node_folder, [broken])[0]
