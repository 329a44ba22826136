"""The patches of an overlay, from the answers and the pods' layout: sizes, nodes, claims. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.deploy.answers import Answers, toleration
from launcher.deploy.overlay.kustomize import Manifest
from launcher.deploy.overlay.layout import PodLayout

GPU = "nvidia.com/gpu"
WORKLOADS = ("StatefulSet", "Job", "Deployment")
CLAIMS = ("run", "models")
# Memory of a rank and of an engine on CPUs; deploy/overlays/dev-cpu has the same.
_CPU_RANK_GIB, _CPU_ENGINE_GIB = 3, 6
_GPU_NODES = "gpu-nodes"


def sizes(answers: Answers, layout: PodLayout) -> list[Manifest]:
    """Make the patches of what trainer and rollout pods hold and ask for."""
    ranks = {"name": "TANDEM_RANKS_PER_HOST", "value": str(layout.ranks_per_host)}
    trainer = _resources(answers, layout.ranks_per_host, _CPU_RANK_GIB)
    rollout = _resources(answers, layout.ranks_per_engine_host, _CPU_ENGINE_GIB)
    return [
        _container("StatefulSet", "trainer", {"env": [ranks], "resources": trainer}),
        _container("StatefulSet", "rollout", {"resources": rollout}),
    ]


def nodes(answers: Answers, built: Sequence[Manifest]) -> list[Manifest]:
    """Make the patches of where pods may run: trainer and rollouts, or all pods of a run on a single node."""
    tolerations = [toleration(text) for text in answers.tolerations]
    if answers.uses_gpus and (tolerations or _GPU_NODES not in answers.components):
        usual = toleration(f"{GPU}:NoSchedule")
        tolerations += [usual] if usual["key"] not in {given["key"] for given in tolerations} else []
    spec: dict[str, Any] = {}
    if answers.node_selector:
        spec["nodeSelector"] = dict(answers.node_selector)
    if tolerations:
        spec["tolerations"] = tolerations
    all_together = answers.overlay != "cluster"
    workloads = [manifest for manifest in built if manifest["kind"] in WORKLOADS]
    wanted = [entry for entry in workloads if all_together or gpus_of(entry["spec"]["template"])]
    return [_pod(manifest, spec) for manifest in wanted] if spec else []


def claims(answers: Answers, built: Iterable[Manifest]) -> list[Manifest]:
    """Make the patches that exchange the claims, of the pods that mount them."""
    given = dict(zip(CLAIMS, (answers.run_claim, answers.models_claim), strict=True))
    changed = {name: claim for name, claim in given.items() if claim != name}
    found = []
    for manifest in (entry for entry in built if entry["kind"] in WORKLOADS):
        volumes = [
            {"name": volume["name"], "persistentVolumeClaim": {"claimName": changed[name]}}
            for volume in manifest["spec"]["template"]["spec"].get("volumes", [])
            if (name := volume.get("persistentVolumeClaim", {}).get("claimName", "")) in changed
        ]
        if volumes:
            found.append(_pod(manifest, {"volumes": volumes}))
    return found


def storage(answers: Answers, built: Iterable[Manifest]) -> list[Manifest]:
    """Make the patches of the storage class of the claims that are a run's own."""
    own = [manifest for manifest in built if manifest["kind"] == "PersistentVolumeClaim" and not is_shared(manifest)]
    spec = {"storageClassName": answers.storage_class}
    return [_head(manifest) | {"spec": spec} for manifest in own] if answers.storage_class else []


def removed(built: Iterable[Manifest]) -> list[Manifest]:
    """Make the patches that take what exists once per namespace out of a run."""
    return [_head(manifest) | {"$patch": "delete"} for manifest in built if is_shared(manifest)]


def is_shared(manifest: Manifest) -> bool:
    """Whether an object is the namespace's and not a run's."""
    name = manifest["metadata"]["name"]
    return manifest["kind"] == "Namespace" or (manifest["kind"] == "PersistentVolumeClaim" and name in CLAIMS)


def gpus_of(template: Mapping[str, Any]) -> int:
    """Return the GPUs that a pod asks for."""
    containers = template["spec"]["containers"]
    return sum(int((container.get("resources", {}).get("limits") or {}).get(GPU, 0)) for container in containers)


def _resources(answers: Answers, ranks: int, cpu_gib: int) -> dict[str, Any]:
    if answers.uses_gpus:
        amounts = {
            "cpu": str(answers.cpus_per_gpu * ranks),
            "memory": f"{answers.memory_gib_per_gpu * ranks}Gi",
            GPU: str(ranks),
        }
    else:
        amounts = {"cpu": str(ranks), "memory": f"{cpu_gib * ranks}Gi"}
    return {"requests": amounts, "limits": dict(amounts)}


def _container(kind: str, name: str, content: dict[str, Any]) -> Manifest:
    head = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}}
    return {**head, "spec": {"template": {"spec": {"containers": [{"name": name, **content}]}}}}


def _pod(workload: Manifest, spec: dict[str, Any]) -> Manifest:
    return _head(workload) | {"spec": {"template": {"spec": spec}}}


def _head(manifest: Manifest) -> Manifest:
    name = {"name": manifest["metadata"]["name"]}
    return {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"], "metadata": name}
