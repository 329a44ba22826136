"""What an API server refuses, as far as our objects could break it: schemas, PodSecurity, fields that are immutable."""

import kubernetes_validate

from tests.fakes.cluster.http import BUILT_IN
from tests.fakes.fake_kube_store import Object, refusal

SCHEMAS = "1.34"
_MUTABLE = {
    "Job": {"parallelism", "suspend", "activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"},
    "StatefulSet": {"replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit", "minReadySeconds"}
    | {"persistentVolumeClaimRetentionPolicy"},
}


def update_refusal(old: Object, new: Object) -> str:
    """What the API server says to a change of an object; "" if it accepts it."""
    kind = new["kind"]
    if kind not in _MUTABLE:
        return ""
    before, after = old["spec"], new["spec"]
    fixed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} - _MUTABLE[kind]
    return f"spec.{min(fixed)}: field is immutable" if fixed else ""


def validate(kind: str, body: Object) -> None:
    if body["apiVersion"] not in BUILT_IN:
        return
    try:
        kubernetes_validate.validate(body, SCHEMAS, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise refusal(422, "Invalid", f"{kind} is invalid: {list(error.path)}: {error.message}") from None


def admit(namespace: Object, pod: Object) -> None:
    """PodSecurity `restricted`: what our pods could get wrong."""
    level = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce")
    if level != "restricted":
        return
    spec, found = pod["spec"], []
    of_pod = spec.get("securityContext") or {}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        own = container.get("securityContext") or {}
        name, capabilities = container["name"], own.get("capabilities") or {}
        if own.get("privileged"):
            found.append(f'privileged (container "{name}" must not set securityContext.privileged=true)')
        if own.get("allowPrivilegeEscalation") is not False:
            found.append(f'allowPrivilegeEscalation != false (container "{name}")')
        if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            found.append(f'unrestricted capabilities (container "{name}")')
        if not (own.get("runAsNonRoot") or of_pod.get("runAsNonRoot")):
            found.append(f'runAsNonRoot != true (container "{name}")')
        if not (own.get("seccompProfile") or of_pod.get("seccompProfile")):
            found.append(f'seccompProfile (container "{name}")')
    if spec.get("hostNetwork") or spec.get("hostIPC") or spec.get("hostPID"):
        found.append("host namespaces")
    found += [
        f'restricted volume types (volume "{each["name"]}")' for each in spec.get("volumes", []) if "hostPath" in each
    ]
    if found:
        text = f'violates PodSecurity "restricted:latest": {", ".join(found)}'
        raise refusal(403, "Forbidden", f'pods "{pod["metadata"]["name"]}" is forbidden: {text}')
