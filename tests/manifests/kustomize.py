"""Builds our kustomizations with the real kubectl, and reads what comes out."""

import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.house.repository import REPO

DEPLOY = REPO / "deploy"
# What is applied once, apart from runs: of a namespace, or of the cluster.
ONCE = ("namespace", "namespace-privileged", "storage", "storage-one-node", "queues", "monitoring")
OVERLAYS = tuple(sorted(path.parent.name for path in DEPLOY.glob("overlays/*/kustomization.yaml")))
COMPONENTS = tuple(sorted(path.parent.name for path in DEPLOY.glob("components/*/kustomization.yaml")))
# Components need kustomize 3.7, `labels` with includeTemplates 5.0 (kubectl 1.27); Debian 12's own kubectl has 2.0.
OLDEST_KUSTOMIZE = (5, 0)
_BUILD_S = 60.0
WORKLOADS = ("StatefulSet", "Job", "Deployment", "JobSet", "LeaderWorkerSet")
# Pods of one service that are not all alike: component -> service.
WORKERS = {"rollout-worker": "rollout"}
# Overlays with the components that people combine: name -> (overlay, components in their order).
VARIANTS = {
    "cluster + all": (
        "cluster",
        (
            "gpu-nccl",
            "mtls",
            "monitoring",
            "standby-coordinator",
            "autoscale-rollout",
            "jobset-trainer",
            "lws-rollout",
            "kueue",
        ),
    ),
    "cluster + names": (
        "cluster",
        ("names", "disk-transport", "gpu-nodes", "pull-secret", "tracing", "mtls", "jobset-trainer", "lws-rollout"),
    ),
    "cluster + external-redis": ("cluster", ("names", "external-redis", "monitoring", "lws-rollout")),
    "cluster + reward-server": ("cluster", ("reward-server",)),
    "cluster + environment-server": ("cluster", ("environment-server",)),
    "single-node-gpu + mtls": ("single-node-gpu", ("gpu-nccl", "mtls")),
    "dev-cpu + jobset": ("dev-cpu", ("jobset-trainer", "monitoring")),
}

Manifest = dict[str, Any]


@functools.cache
def kubectl() -> str:
    """Path of a kubectl that can build. Skips the test, loudly, where there is none."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("NO KUBECTL: the manifests were not built; install kubectl 1.27 or newer (docs/kubernetes.md)")
    answer = subprocess.run(
        [program, "version", "--client", "--output", "json"], capture_output=True, text=True, check=True, timeout=30
    )
    version = json.loads(answer.stdout).get("kustomizeVersion", "v0.0.0")
    if tuple(int(part) for part in version.lstrip("v").split(".")[:2]) < OLDEST_KUSTOMIZE:
        pytest.skip(f"OLD KUBECTL: the manifests were not built; its kustomize is {version}, 5.0 or newer is needed")
    return program


@functools.cache
def build(folder: Path) -> tuple[Manifest, ...]:
    """What `kubectl kustomize FOLDER` prints. Raises: AssertionError: it failed; with its error."""
    answer = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=_BUILD_S)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "deprecated" not in answer.stderr, answer.stderr
    return tuple(yaml.load_all(answer.stdout, Loader=yaml.CSafeLoader))


def overlay(name: str) -> tuple[Manifest, ...]:
    """An overlay of the repository, `base`, one of ONCE, or one of VARIANTS."""
    if name in VARIANTS:
        return variant(name)
    return build(DEPLOY / name if name in ("base", *ONCE) else DEPLOY / "overlays" / name)


@functools.cache
def variant(name: str) -> tuple[Manifest, ...]:
    """One of VARIANTS."""
    with tempfile.TemporaryDirectory() as folder:
        return combine(Path(folder), *VARIANTS[name])


def combine(
    folder: Path, base: str, components: Sequence[str], run: str = "", namespace: str = "tandem"
) -> tuple[Manifest, ...]:
    """An overlay with components added, as a user's own kustomization would, written to `folder`.

    Args:
        run: id of a run beside others, which is the prefix of its names then; "": the overlay's own, without a prefix.
    """
    content: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(DEPLOY / "overlays" / base, folder.resolve())],
        "components": [os.path.relpath(DEPLOY / "components" / each, folder.resolve()) for each in components],
    }
    if run:
        content["namespace"], content["namePrefix"] = namespace, f"{run}-"
    own = yaml.safe_load((DEPLOY / "overlays" / base / "kustomization.yaml").read_text(encoding="utf-8"))["labels"]
    (run_label,) = [each for each in own if "tandem.run/id" in each["pairs"]]
    content["labels"] = [{**run_label, "pairs": {"tandem.run/id": run or run_label["pairs"]["tandem.run/id"]}}]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return build(folder)


def find(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """The one object of this kind and name (a generated name without its hash). Raises: AssertionError."""
    found = [each for each in manifests if each["kind"] == kind and _plain(each) == name]
    assert len(found) == 1, f"{len(found)} objects {kind}/{name} of {sorted(label(each) for each in manifests)}"
    return found[0]


def kinds(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    """All objects of a kind."""
    return [each for each in manifests if each["kind"] == kind]


def label(manifest: Manifest) -> str:
    """`Kind/name` for messages."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def workloads(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Everything that makes pods."""
    return [each for each in manifests if each["kind"] in WORKLOADS]


def pod_template(workload: Manifest) -> Manifest:
    """The pod template of a workload; of a LeaderWorkerSet its leaders'."""
    if workload["kind"] == "JobSet":
        (jobs,) = workload["spec"]["replicatedJobs"]
        return dict(jobs["template"]["spec"]["template"])
    if workload["kind"] == "LeaderWorkerSet":
        return dict(workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"])
    return dict(workload["spec"]["template"])


def worker_template(workload: Manifest) -> Manifest:
    """The pod template of a LeaderWorkerSet's workers."""
    return dict(workload["spec"]["leaderWorkerTemplate"]["workerTemplate"])


def pod_templates(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Workload -> its pod template; a LeaderWorkerSet has a second one."""
    leaders = {label(each): pod_template(each) for each in workloads(manifests)}
    groups = kinds(manifests, "LeaderWorkerSet")
    return leaders | {f"{label(each)} (workers)": worker_template(each) for each in groups}


def component_of(template: Manifest) -> str:
    """coordinator, trainer, rollout, rollout-worker or redis."""
    return str(template["metadata"]["labels"]["app.kubernetes.io/component"])


def service_of(template: Manifest) -> str:
    """coordinator, trainer, rollout or redis: which program it runs."""
    component = component_of(template)
    return WORKERS.get(component, component)


def templates_of(manifests: Sequence[Manifest], service: str) -> list[Manifest]:
    """The pod templates that run a service: one, or two."""
    found = [each for each in pod_templates(manifests).values() if service_of(each) == service]
    assert found, service
    return found


def containers(template: Manifest) -> list[Manifest]:
    """Containers and init containers."""
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def environment(container: Manifest) -> dict[str, Manifest]:
    """Name -> the whole entry of `env`."""
    return {entry["name"]: entry for entry in container.get("env", [])}


def run_yaml(manifests: Sequence[Manifest]) -> str:
    """The run's configuration; of a run beside others, too."""
    (found,) = [each for each in kinds(manifests, "ConfigMap") if _plain(each).endswith("run-config")]
    return str(found["data"]["run.yaml"])


def matches(selector: Mapping[str, object], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes a pod; a Service's is labels alone."""
    if not {"matchLabels", "matchExpressions"} & set(selector):
        return bool(selector) and all(labels.get(key) == value for key, value in selector.items())
    equal = selector.get("matchLabels", {})
    assert isinstance(equal, dict)
    wanted: dict[str, list[str]] = {key: [value] for key, value in equal.items()}
    expressions = selector.get("matchExpressions", [])
    assert isinstance(expressions, list)
    for each in expressions:
        assert each["operator"] == "In"
        wanted.setdefault(each["key"], each["values"])
    return all(labels.get(key) in values for key, values in wanted.items())


def strings(value: Any) -> Iterator[str]:
    """Every string in a tree."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def _plain(manifest: Manifest) -> str:
    """The name without the hash that kustomize appends to generated objects."""
    name: str = manifest["metadata"]["name"]
    stem, _, last = name.rpartition("-")
    generated = manifest["kind"] in ("ConfigMap", "Secret") and len(last) == 10 and stem
    return stem if generated else name
