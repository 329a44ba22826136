"""The kinds that the fake API server knows: one row each."""

from dataclasses import dataclass

VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A resource. subresources: of those that kubectl and the client see in discovery."""

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def is_custom(self) -> bool:
        """Whether a CustomResourceDefinition would define it: the API server knows no merge keys of such."""
        return "." in self.group and not self.group.endswith(".k8s.io")


def _kind(api_version: str, plural: str, name: str, *short: str, namespaced: bool = True, sub: str = "") -> Kind:
    group, _, version = api_version.rpartition("/")
    return Kind(
        group=group,
        version=version,
        plural=plural,
        name=name,
        namespaced=namespaced,
        short_names=short,
        subresources=tuple(sub.split()),
    )


KINDS = (
    _kind("v1", "namespaces", "Namespace", "ns", namespaced=False, sub="status"),
    _kind("v1", "nodes", "Node", "no", namespaced=False, sub="status"),
    _kind("v1", "pods", "Pod", "po", sub="status eviction"),
    _kind("v1", "services", "Service", "svc", sub="status"),
    _kind("v1", "serviceaccounts", "ServiceAccount", "sa"),
    _kind("v1", "configmaps", "ConfigMap", "cm"),
    _kind("v1", "secrets", "Secret"),
    _kind("v1", "events", "Event", "ev"),
    _kind("v1", "limitranges", "LimitRange", "limits"),
    _kind("v1", "resourcequotas", "ResourceQuota", "quota", sub="status"),
    _kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim", "pvc", sub="status"),
    _kind("apps/v1", "deployments", "Deployment", "deploy", sub="status scale"),
    _kind("apps/v1", "statefulsets", "StatefulSet", "sts", sub="status scale"),
    _kind("apps/v1", "daemonsets", "DaemonSet", "ds", sub="status"),
    _kind("batch/v1", "jobs", "Job", sub="status"),
    _kind("batch/v1", "cronjobs", "CronJob", "cj", sub="status"),
    _kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", "netpol"),
    _kind("networking.k8s.io/v1", "ingresses", "Ingress", "ing", sub="status"),
    _kind("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", "pdb", sub="status"),
    _kind("rbac.authorization.k8s.io/v1", "roles", "Role"),
    _kind("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding"),
    _kind("rbac.authorization.k8s.io/v1", "clusterroles", "ClusterRole", namespaced=False),
    _kind("rbac.authorization.k8s.io/v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    _kind("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", "pc", namespaced=False),
    _kind("autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", "hpa", sub="status"),
    _kind("storage.k8s.io/v1", "storageclasses", "StorageClass", "sc", namespaced=False),
    # Custom resources: without a schema here, so their fields are not validated.
    _kind("monitoring.coreos.com/v1", "podmonitors", "PodMonitor"),
    _kind("monitoring.coreos.com/v1", "servicemonitors", "ServiceMonitor"),
    _kind("monitoring.coreos.com/v1", "prometheusrules", "PrometheusRule"),
    _kind("cert-manager.io/v1", "certificates", "Certificate"),
    _kind("cert-manager.io/v1", "issuers", "Issuer"),
    _kind("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet"),
    _kind("leaderworkerset.x-k8s.io/v1", "leaderworkersets", "LeaderWorkerSet", "lws", sub="status scale"),
    _kind("kueue.x-k8s.io/v1beta1", "localqueues", "LocalQueue"),
    _kind("kueue.x-k8s.io/v1beta1", "clusterqueues", "ClusterQueue", namespaced=False),
    _kind("kueue.x-k8s.io/v1beta1", "resourceflavors", "ResourceFlavor", namespaced=False),
    _kind("keda.sh/v1alpha1", "scaledobjects", "ScaledObject", "so"),
)


def resource_list(api_version: str) -> dict[str, object]:
    """The discovery document of a group and version."""
    rows = []
    for kind in KINDS:
        if kind.api_version == api_version:
            row = {"name": kind.plural, "singularName": kind.name.lower(), "kind": kind.name}
            rows.append({**row, "namespaced": kind.namespaced, "shortNames": kind.short_names, "verbs": VERBS})
            rows += [
                {"name": f"{kind.plural}/{sub}", "singularName": "", "namespaced": kind.namespaced, **_sub(kind, sub)}
                for sub in kind.subresources
            ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": rows}


def _sub(kind: Kind, sub: str) -> dict[str, object]:
    if sub == "scale":
        return {"kind": "Scale", "group": "autoscaling", "version": "v1", "verbs": ("get", "patch", "update")}
    if sub == "eviction":
        return {"kind": "Eviction", "group": "policy", "version": "v1", "verbs": ("create",)}
    return {"kind": kind.name, "verbs": ("get", "patch", "update")}


def group_list() -> dict[str, object]:
    """The discovery document of all named groups."""
    groups = []
    for api_version in dict.fromkeys(kind.api_version for kind in KINDS if kind.group):
        group, _, version = api_version.partition("/")
        here = {"groupVersion": api_version, "version": version}
        groups.append({"name": group, "versions": [here], "preferredVersion": here})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
