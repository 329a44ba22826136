"""The kinds of objects that a run may have, and where the API has them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.fleet.kubernetes.api.pods import COMPONENT_LABEL
from launcher.deploy.overlay.kustomize import Manifest
from launcher.deploy.overlay.patches import WORKLOADS


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of namespaced object. api_version: `v1` or `group/version`."""

    name: str
    api_version: str
    plural: str

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of the objects in a namespace, or of one of them."""
        root = "/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"
        return f"{root}/namespaces/{namespace}/{self.plural}{f'/{name}' if name else ''}"


def _kind(name: str, api_version: str, plural: str = "") -> Kind:
    return Kind(name=name, api_version=api_version, plural=plural or f"{name.lower()}s")


# What makes pods comes first: it is deleted first, with all its pods, before what they need.
MAKES_PODS = (
    _kind("Job", "batch/v1"),
    _kind("JobSet", "jobset.x-k8s.io/v1alpha2"),
    _kind("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1"),
    _kind("StatefulSet", "apps/v1"),
    _kind("Deployment", "apps/v1"),
    _kind("Pod", "v1"),
)
CLAIM = _kind("PersistentVolumeClaim", "v1")
KINDS = (
    *MAKES_PODS,
    _kind("HorizontalPodAutoscaler", "autoscaling/v2"),
    _kind("PodDisruptionBudget", "policy/v1"),
    _kind("Service", "v1"),
    _kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
    _kind("ConfigMap", "v1"),
    _kind("Secret", "v1"),
    _kind("ServiceAccount", "v1"),
    _kind("RoleBinding", "rbac.authorization.k8s.io/v1"),
    _kind("Role", "rbac.authorization.k8s.io/v1"),
    _kind("PodMonitor", "monitoring.coreos.com/v1"),
    _kind("PrometheusRule", "monitoring.coreos.com/v1"),
    _kind("Certificate", "cert-manager.io/v1"),
    _kind("Issuer", "cert-manager.io/v1"),
    CLAIM,
)
BY_NAME = {(kind.api_version.rpartition("/")[0], kind.name): kind for kind in KINDS}
# Not a run's, though an overlay may have them: of the namespace, or of the cluster.
SHARED = frozenset({"Namespace", "ClusterQueue", "LocalQueue", "ResourceFlavor"})


def kind_of(manifest: dict[str, object]) -> Kind | None:
    """Find the kind of a manifest; None: it is shared, or unknown. The version may be any of its group."""
    return BY_NAME.get((str(manifest["apiVersion"]).rpartition("/")[0], str(manifest["kind"])))


def component_of(template: Mapping[str, Any]) -> str:
    """Return the component of a pod template or an object."""
    return str((template["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether a pod holds nothing any more."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def templates(built: Iterable[Manifest]) -> Iterator[tuple[str, Manifest, int]]:
    """Find the pod templates: `Kind/name`, template, number of pods."""
    for manifest in built:
        name, spec = f"{manifest['kind']}/{manifest['metadata']['name']}", manifest.get("spec", {})
        if manifest["kind"] in WORKLOADS:
            yield name, spec["template"], int(spec.get("replicas", 1))
        elif manifest["kind"] == "JobSet":
            for job in spec["replicatedJobs"]:
                inner = job["template"]["spec"]
                yield name, inner["template"], int(job.get("replicas", 1)) * int(inner.get("completions", 1))
        elif manifest["kind"] == "LeaderWorkerSet":
            groups, size = int(spec.get("replicas", 1)), int(spec["leaderWorkerTemplate"].get("size", 1))
            yield name, spec["leaderWorkerTemplate"]["leaderTemplate"], groups
            yield f"{name} (workers)", spec["leaderWorkerTemplate"]["workerTemplate"], groups * (size - 1)
