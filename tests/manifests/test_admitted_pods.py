"""Every pod of every build is one that an API server takes: as its controller makes it, with the run's labels.

A server does not look into a template of a StatefulSet, JobSet or LeaderWorkerSet: such an object is accepted, and its
pods never exist.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.deploy.answers import LONGEST_RUN_ID
from tests.fakes.cluster.admission import check_pod, check_schema
from tests.fakes.cluster.controllers import pods_of
from tests.fakes.cluster.store import Object
from tests.manifests.kustomize import (
    COMPONENTS,
    OVERLAYS,
    VARIANTS,
    Manifest,
    combine,
    kinds,
    label,
    matches,
    overlay,
    pod_templates,
    workloads,
)
from tests.manifests.test_components import PARTS, place

# Needs a namespace that is `privileged`.
PRIVILEGED = "gpu-nccl/ipc-lock"
RUNS = ("", "red", "r" * LONGEST_RUN_ID)
PARTED = [f"{whole}/{part}" for whole, parts in PARTS.items() for part in parts]


def admit(manifests: Sequence[Manifest], *, level: str = "restricted") -> int:
    """Create all pods, as their controllers do. Returns: how many. Raises: Refusal."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    namespace: Object = {"metadata": {"name": "tandem", "labels": labels}}
    made = 0
    for workload in workloads(manifests):
        assert workload["metadata"]["labels"]["tandem.run/id"], label(workload)
        for pod in pods_of(workload):
            check_schema(pod)
            check_pod(namespace, pod, pod["metadata"]["name"])
            assert len(pod["metadata"]["name"]) <= 63
            made += 1
    return made


def selects_all_of_its_pods(manifests: Sequence[Manifest]) -> None:
    """What makes pods is refused where its selector does not match its template."""
    templates = pod_templates(manifests)
    for each in workloads(manifests):
        if "selector" in each["spec"]:
            assert matches(each["spec"]["selector"], templates[label(each)]["metadata"]["labels"]), label(each)


@pytest.mark.parametrize("name", [*OVERLAYS, *VARIANTS])
def test_pods_of_overlays_and_of_components_together(name: str) -> None:
    assert admit(overlay(name)) >= 4
    selects_all_of_its_pods(overlay(name))


@pytest.mark.parametrize(("name", "run"), [(name, run) for name in (*COMPONENTS, *PARTED) for run in RUNS[:2]])
def test_pods_of_each_component(name: str, run: str, tmp_path: Path) -> None:
    base = "single-node-gpu" if name == "single-node" else "cluster"
    try_component(base, name, run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "name", "run"), list(itertools.product(OVERLAYS, (*COMPONENTS, *PARTED), RUNS)))
def test_pods_of_each_component_on_each_overlay(base: str, name: str, run: str, tmp_path: Path) -> None:
    try_component(base, name, run, tmp_path)


def try_component(base: str, name: str, run: str, folder: Path) -> None:
    whole, _, part = name.partition("/")
    components = sorted({whole, *(["names"] if run else [])}, key=place)
    manifests = combine(folder, base, [*components, *([name] if part else [])], run)
    assert admit(manifests, level="privileged" if name == PRIVILEGED else "restricted") >= 4
    selects_all_of_its_pods(manifests)
    ids = {each["metadata"].get("labels", {}).get("tandem.run/id") for each in manifests if each["kind"] != "Namespace"}
    assert len(ids) == 1, "status and delete find what has the run's id"


@pytest.mark.parametrize("run", RUNS[1:])
def test_pods_of_groups_of_the_longest_name(run: str, tmp_path: Path) -> None:
    """999 trainer pods and 99 engines, whose names and labels end in their numbers."""
    manifests = combine(tmp_path, "cluster", ["names", "jobset-trainer", "lws-rollout"], run)
    (jobs,) = kinds(manifests, "JobSet")[0]["spec"]["replicatedJobs"]
    jobs["template"]["spec"] |= {"completions": 999, "parallelism": 999}
    (group,) = kinds(manifests, "LeaderWorkerSet")
    group["spec"]["replicas"] = 99
    for workload in workloads(manifests):
        pods = list(pods_of(workload))
        check_pod({"metadata": {}}, pods[-1], pods[-1]["metadata"]["name"])
        assert len(pods[-1]["metadata"]["name"]) <= 63
        # JobSet's webhook refuses what a Job would have to cut.
        assert "--" not in pods[-1]["metadata"]["name"]
