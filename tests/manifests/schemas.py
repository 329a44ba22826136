"""Which objects Kubernetes itself defines, and how one is checked against a version's schema."""

import kubernetes_validate

from tests.manifests.kustomize import Manifest, label

VERSIONS = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
# Groups of custom resources: their controllers define them, not Kubernetes.
CUSTOM_GROUPS = (
    "cert-manager.io",
    "jobset.x-k8s.io",
    "keda.sh",
    "kueue.x-k8s.io",
    "leaderworkerset.x-k8s.io",
    "monitoring.coreos.com",
)


def is_custom(manifest: Manifest) -> bool:
    """Whether the object is of a custom resource."""
    return manifest["apiVersion"].partition("/")[0] in CUSTOM_GROUPS


def problems(manifest: Manifest, version: str) -> list[str]:
    """What the strict schema of a Kubernetes version says against an object; unknown fields count."""
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        place = ".".join(str(part) for part in error.path)
        return [f"{label(manifest)} in {version}: {place}: {error.message}"]
    return []
