"""Custom resources, strictly: an unknown or misplaced field fails.

kind                                  checked against
Certificate, Issuer                   npm: @kubernetes-models/cert-manager (slow: the test installs it)
PodMonitor, PrometheusRule            npm: @kubernetes-models/prometheus-operator (slow)
JobSet                                PyPI: kubeflow-trainer-api, whose models are made from JobSet's definition
LeaderWorkerSet, Kueue's              SCHEMAS: read off their definitions, which no registry has, on 2026-11-20 and 23
Jobs and pods inside of these         Kubernetes' own schemas

The definitions are, of LeaderWorkerSet v1, api/leaderworkerset/v1 of kubernetes-sigs/lws at 024af084; of ClusterQueue,
LocalQueue and ResourceFlavor v1beta2 (Kueue 0.20 no longer serves v1beta1), apis/kueue/v1beta2 of
kubernetes-sigs/kueue at 013c8f25, dfe97723, 38aefec9.
"""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.manifests.kustomize import (
    DEPLOY,
    ONCE,
    VARIANTS,
    Manifest,
    find,
    kinds,
    label,
    overlay,
    pod_template,
    worker_template,
)
from tests.manifests.schemas import VERSIONS, is_custom, problems

PUBLISHED = {
    "cert-manager.io/v1": "@kubernetes-models/cert-manager/cert-manager.io/v1",
    "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
}
PACKAGES = ("@kubernetes-models/cert-manager@6.0.0", "@kubernetes-models/prometheus-operator@6.0.0", "typescript@5.9.3")
INSTALL_S, CHECK_S = 240.0, 120.0
NODE = Path(__file__).parent / "node"


# SCHEMAS says which fields there are at each level that we use, of which type and with which values, so that an
# unknown, misplaced or misspelt field fails; levels that we do not use end as OBJECT. `metadata` is checked as that of
# a ConfigMap; pod templates as those of a pod.
Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": ["integer", "string"], "pattern": r"^[0-9.]+([KMGTPE]i?|m)?$"}


def one_of(*values: str) -> Schema:
    """One of these texts."""
    return {"enum": list(values)}


def items(schema: Schema) -> Schema:
    """A list of these."""
    return {"type": "array", "items": schema}


def fields(*required: str, **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def document(spec: Schema) -> Schema:
    """A whole object."""
    return fields("apiVersion", "kind", "metadata", "spec", apiVersion=TEXT, kind=TEXT, metadata=OBJECT, spec=spec)


LEADER_WORKERS = fields(
    "workerTemplate",
    leaderTemplate=OBJECT,
    workerTemplate=OBJECT,
    size={"type": "integer", "minimum": 1},
    restartPolicy=one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),  # "Default" is deprecated
    subGroupPolicy=fields(subGroupPolicyType=one_of("LeaderWorker", "LeaderExcluded"), subGroupSize=NUMBER),
    volumeClaimTemplates=items(OBJECT),
    persistentVolumeClaimRetentionPolicy=OBJECT,
)
ROLLING_UPDATE = fields(partition=NUMBER, maxUnavailable=QUANTITY, maxSurge=QUANTITY)
LIMITS: Mapping[str, Schema] = {"borrowingLimit": QUANTITY, "lendingLimit": QUANTITY}
QUOTA = fields("name", "nominalQuota", name=TEXT, nominalQuota=QUANTITY, **LIMITS)
FLAVOR = fields("name", "resources", name=TEXT, resources=items(QUOTA))
STOP_POLICY = one_of("None", "Hold", "HoldAndDrain")
SCHEMAS: Mapping[tuple[str, str], Schema] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): document(
        fields(
            "leaderWorkerTemplate",
            replicas=NUMBER,
            leaderWorkerTemplate=LEADER_WORKERS,
            rolloutStrategy=fields("type", type=one_of("RollingUpdate"), rollingUpdateConfiguration=ROLLING_UPDATE),
            startupPolicy=one_of("LeaderCreated", "LeaderReady"),
            networkConfig=fields("subdomainPolicy", subdomainPolicy=one_of("Shared", "UniquePerReplica")),
        )
    ),
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"): document(
        fields(
            admissionChecksStrategy=OBJECT,
            admissionScope=OBJECT,
            cohortName=TEXT,
            concurrentAdmissionPolicy=OBJECT,
            fairSharing=OBJECT,
            flavorFungibility=OBJECT,
            namespaceSelector=fields(matchLabels=LABELS, matchExpressions=items(OBJECT)),
            preemption=OBJECT,
            queueingStrategy=one_of("StrictFIFO", "BestEffortFIFO"),
            resourceGroups=items(
                fields("coveredResources", "flavors", coveredResources=items(TEXT), flavors=items(FLAVOR))
            ),
            stopPolicy=STOP_POLICY,
        )
    ),
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"): document(
        fields(clusterQueue=TEXT, stopPolicy=STOP_POLICY, fairSharing=OBJECT)
    ),
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"): document(
        fields(nodeLabels=LABELS, nodeTaints=items(OBJECT), tolerations=items(OBJECT), topologyName=TEXT)
    ),
}


def custom_resources() -> list[Manifest]:
    return [each for name in (*VARIANTS, *ONCE) for each in overlay(name) if is_custom(each)]


def kind_of(manifest: Manifest) -> tuple[str, str]:
    return manifest["apiVersion"], manifest["kind"]


def test_each_kind_is_checked_somewhere() -> None:
    known = {*SCHEMAS, ("jobset.x-k8s.io/v1alpha2", "JobSet")}
    used = {kind_of(each) for each in custom_resources() if each["apiVersion"] not in PUBLISHED}
    assert used == known


def mistakes(manifest: Manifest) -> list[str]:
    """What the schema that was read off its definition says against an object."""
    found = jsonschema.Draft202012Validator(SCHEMAS[kind_of(manifest)]).iter_errors(manifest)
    return [f"{label(manifest)}: {error.json_path}: {error.message}" for error in found]


def test_they_are_as_their_definitions_say() -> None:
    assert not [text for each in custom_resources() if kind_of(each) in SCHEMAS for text in mistakes(each)]


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("LeaderWorkerSet", "rollout", "spec.restartPolicy"),
        ("LeaderWorkerSet", "rollout", "spec.leaderWorkerTemplate.startupPolicy"),
        ("LeaderWorkerSet", "rollout", "spec.leaderWorkerTemplate.template"),
        ("LeaderWorkerSet", "rollout", "spec.rolloutStrategy.maxSurge"),
        ("ClusterQueue", "tandem", "spec.resourceGroups.0.flavors.0.resources.0.quota"),
        ("ClusterQueue", "tandem", "spec.namespaceSelector.namespace"),
        ("LocalQueue", "tandem", "clusterQueue"),
        ("ResourceFlavor", "tandem-gpu", "spec.labels"),
    ],
)
def test_a_field_in_the_wrong_place_is_found(kind: str, name: str, path: str) -> None:
    broken = copy.deepcopy(find((*overlay("cluster + all"), *overlay("queues")), kind, name))
    *parents, last = path.split(".")
    node = broken
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[last] = "x"
    (mistake,) = mistakes(broken)
    assert f"'{last}' was unexpected" in mistake


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("startupPolicy", "LeaderFirst"),
        ("leaderWorkerTemplate.size", "2"),
        ("leaderWorkerTemplate.size", 0),
        ("leaderWorkerTemplate.restartPolicy", "Always"),
    ],
)
def test_a_wrong_value_is_found(path: str, value: object) -> None:
    broken = copy.deepcopy(find(overlay("cluster + all"), "LeaderWorkerSet", "rollout"))
    *parents, last = path.split(".")
    node = broken["spec"]
    for part in parents:
        node = node[part]
    node[last] = value
    assert f"$.spec.{path}" in mistakes(broken)[0]


def lost(wanted: object, found: object, path: str = "") -> list[str]:
    """Paths of what the second has not, or has otherwise."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        missing = [f"{path}.{key}" for key in wanted if key not in found]
        return missing + [
            text for key in wanted if key in found for text in lost(wanted[key], found[key], f"{path}.{key}")
        ]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [text for i, (one, other) in pairs for text in lost(one, other, f"{path}[{i}]")]
    return [] if wanted == found else [path]


def through_the_models(jobset: Manifest) -> Manifest:
    """What JobSet's published models keep of an object. They drop what they do not know, and refuse wrong types."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    model = JobsetV1alpha2JobSet.from_dict(jobset)
    assert model is not None
    kept: Manifest = model.to_dict()
    return kept


def test_jobsets_published_models_accept_ours_and_find_mistakes() -> None:
    (jobset,) = kinds(overlay("cluster + all"), "JobSet")
    assert lost(jobset, through_the_models(jobset)) == []
    broken = copy.deepcopy(jobset)
    broken["spec"]["network"]["subdomian"] = "x"
    broken["spec"]["replicatedJobs"][0]["template"]["backoffLimit"] = 0
    assert lost(broken, through_the_models(broken)) == [
        ".spec.network.subdomian",
        ".spec.replicatedJobs[0].template.backoffLimit",
    ]
    broken["spec"]["failurePolicy"]["maxRestarts"] = "20"
    with pytest.raises(ValueError, match="maxRestarts"):
        through_the_models(broken)


def test_the_readme_says_what_they_were_checked_against() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for package in PACKAGES[:2]:
        name, _, version = package.rpartition("@")
        assert f"{name} {version}" in text
    assert f"kubeflow-trainer-api {metadata.version('kubeflow-trainer-api')}" in text
    assert f"(kubernetes-validate {metadata.version('kubernetes-validate').rpartition('.')[0]})" in text
    commits = re.findall(r"\b[0-9a-f]{8}\b", __doc__ or "")
    assert len(commits) == 4
    assert all(commit in text for commit in commits)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_a_leader_worker_set_are_pods(version: str) -> None:
    for name in VARIANTS:
        for group in kinds(overlay(name), "LeaderWorkerSet"):
            for template in (pod_template(group), worker_template(group)):
                pod = {"apiVersion": "v1", "kind": "Pod", **template}
                assert problems({**pod, "metadata": {**pod["metadata"], "name": "inside"}}, version) == []


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
