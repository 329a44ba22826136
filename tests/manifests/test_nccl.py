"""Pods of one node are hosts to NCCL: it uses the network between them, and opens no GPU that another pod has."""

import itertools
from dataclasses import replace

import pytest

from tests.manifests.kustomize import (
    OVERLAYS,
    VARIANTS,
    Manifest,
    containers,
    environment,
    kinds,
    overlay,
    pod_templates,
)
from tests.manifests.nccl_rule import EVERY, GpuContainer, faults, transport
from weightsync.membership.nccl_settings import settle_nccl_settings

GPUS = "nvidia.com/gpu"


def gpu_pods(manifests: tuple[Manifest, ...]) -> list[GpuContainer]:
    """Two pods of each template with GPUs, all on one node, as NCCL sees them."""
    maps = {each["metadata"]["name"]: each["data"] for each in kinds(manifests, "ConfigMap")}
    found = []
    for (owner, template), number in itertools.product(pod_templates(manifests).items(), range(2)):
        name, spec = f"{owner}-{number}", template["spec"]
        for container in containers(template):
            environ = {key: str(entry.get("value", "")) for key, entry in environment(container).items()}
            for source in container.get("envFrom", []):
                environ |= maps[source["configMapRef"]["name"]]
            count = int(container.get("resources", {}).get("limits", {}).get(GPUS, 0))
            if count == 0:
                continue
            settle_nccl_settings(environ, gpu_name="NVIDIA H100 80GB HBM3")
            # the device plug-in gives a pod what it asks for, and no other pod those
            own = frozenset(f"{name}/{index}" for index in range(count))
            namespaces = {
                "ipc": "host" if spec.get("hostIPC") else name,
                "pids": "host" if spec.get("hostPID") else name,
                "network": "host" if spec.get("hostNetwork") else name,
            }
            found.append(GpuContainer(name=name, devices=own, uses=own, environment=environ, **namespaces))
    return found


@pytest.mark.parametrize("name", [name for name in (*OVERLAYS, *VARIANTS) if not name.startswith("dev-cpu")])
def test_pods_of_a_node_meet_over_the_network(name: str) -> None:
    pods = gpu_pods(overlay(name))
    assert len(pods) >= 4
    for one, other in itertools.combinations(pods, 2):
        assert (transport(one, other), faults(one, other)) == ("NET", []), f"{one.name} and {other.name}"
    for pod in pods:
        assert "NCCL_HOSTID" not in pod.environment, "pods share no /dev/shm"
        assert (transport(pod, pod), faults(pod, replace(pod, uses=frozenset()))) == ("P2P", [])


ONE_HOST = {"NCCL_HOSTID": "compose"}
FIRST = GpuContainer(
    name="a", devices=EVERY, uses=frozenset("01"), ipc="host", pids="host", network="a", environment=ONE_HOST
)
SECOND = replace(FIRST, name="b", uses=frozenset("2"), network="b")


@pytest.mark.parametrize(
    ("change", "chosen", "why"),
    [
        ({}, "P2P", ""),
        ({"devices": frozenset("2")}, "P2P", "are not in b"),
        ({"devices": frozenset("0123")}, "P2P", ""),
        ({"pids": "b"}, "P2P", "process ids"),
        ({"ipc": "b"}, "NET", ""),
        ({"environment": {}}, "NET", ""),
        ({"uses": frozenset("1")}, "P2P", "both use 1"),
        ({"devices": frozenset("2"), "environment": {**ONE_HOST, "NCCL_P2P_DISABLE": "1"}}, "SHM", ""),
        ({"environment": {**ONE_HOST, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}}, "NET", ""),
    ],
)
def test_the_rule(change: dict[str, object], chosen: str, why: str) -> None:
    """Each row takes one thing from containers that reach each other over NVLink."""
    other = replace(SECOND, **change)  # type: ignore[arg-type]
    assert transport(FIRST, other) == chosen
    found = faults(FIRST, other)
    assert why in found[0] if why else found == [], found


def test_descriptors_of_cumem_cross_no_network() -> None:
    one, other = (replace(each, environment={**ONE_HOST, "NCCL_CUMEM_ENABLE": "1"}) for each in (FIRST, SECOND))
    assert faults(one, other) == ["cuMem's file descriptors cross no networks"]
    assert faults(one, replace(other, network="a")) == []
