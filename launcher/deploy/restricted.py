"""What a pod needs to be admitted where PodSecurity `restricted` is enforced; the user is that of our images."""

from collections.abc import Mapping
from typing import Any

_USER = 10001
POD: dict[str, Any] = {
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
    "restartPolicy": "Never",
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
CONTAINER: dict[str, Any] = {
    "terminationMessagePolicy": "FallbackToLogsOnError",
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
}


def pod(namespace: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return POD for a namespace; in a project of OpenShift, which chooses them, without the user and its groups."""
    annotations = ((namespace or {}).get("metadata") or {}).get("annotations") or {}
    if "openshift.io/sa.scc.uid-range" not in annotations:
        return POD
    context = {key: value for key, value in POD["securityContext"].items() if value != _USER}
    return POD | {"securityContext": context}


def near(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return an affinity: rather on the node of pods with these labels."""
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": dict(labels)}}
    return {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    }
