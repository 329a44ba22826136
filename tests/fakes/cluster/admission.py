"""What an API server refuses of objects that are created or changed, as far as ours could meet it; part of a FAKE.

immutable fields   of Jobs, StatefulSets, Deployments, claims, RoleBindings, ConfigMaps and Secrets
PodSecurity        `restricted` (with `baseline`, which it includes), for pods: of a workload a server only warns, and
                   then refuses the pods that its controller makes
OpenShift          user and group ids that are not of the project's range, which its namespace is annotated with
schemas            strictly, of built-in kinds
pods               what pods.py lists, which schemas let pass: in a workload's template a server does not look for it

It knows no defaults (a server adds fields), no quotas, no other admission, and nothing of custom resources: neither
their schemas nor what their webhooks refuse.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate

from tests.fakes.cluster.kinds import BUILT_IN
from tests.fakes.cluster.pods import pod_errors
from tests.fakes.cluster.store import Object, refusal

# The fields of a version are those of all newer ones, and some servers are still of this one.
SCHEMAS = "1.32"
ENFORCE = "pod-security.kubernetes.io/enforce"
# OpenShift's annotation of a project: `first/number`.
UID_RANGE = "openshift.io/sa.scc.uid-range"
# Fields of `spec` that can be changed; all others cannot.
MUTABLE_SPEC = {
    "Job": {"parallelism", "suspend", "activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"},
    "StatefulSet": {
        "replicas",
        "ordinals",
        "template",
        "updateStrategy",
        "persistentVolumeClaimRetentionPolicy",
        "minReadySeconds",
    },
    "PersistentVolumeClaim": {"resources", "volumeAttributesClassName"},
}
# Fields that cannot be changed; all others can.
IMMUTABLE = {
    "Deployment": ("spec.selector",),
    "RoleBinding": ("roleRef",),
    "Secret": ("type",),
    "Service": ("spec.clusterIP",),
}
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def check_schema(obj: Object) -> None:
    """Raises: Refusal: 400 for a field that is not known, 422 for a wrong value."""
    if obj["apiVersion"] not in BUILT_IN:
        return
    try:
        kubernetes_validate.validate(obj, SCHEMAS, strict=True)
    except kubernetes_validate.ValidationError as error:
        what = f"{obj['kind']} {obj['metadata']['name']!r} is invalid: {list(error.path)}: {error.message}"
        unknown = "Additional properties are not allowed" in error.message
        raise refusal(400 if unknown else 422, "BadRequest" if unknown else "Invalid", what) from None


def check_update(old: Object, new: Object) -> None:
    """Raises: Refusal: 422 for a field that cannot be changed."""
    kind, name = new["kind"], new["metadata"]["name"]
    if kind in MUTABLE_SPEC:
        before, after = old["spec"], new["spec"]
        fixed = sorted(
            key
            for key in before.keys() | after.keys()
            if key not in MUTABLE_SPEC[kind] and before.get(key) != after.get(key)
        )
        if fixed:
            raise refusal(422, "Invalid", f'{kind} "{name}" is invalid: {_forbidden(kind, fixed)}')
    for path in IMMUTABLE.get(kind, ()):
        if _at(old, path) != _at(new, path):
            raise refusal(422, "Invalid", f'{kind} "{name}" is invalid: {path}: Invalid value: field is immutable')
    if kind in ("ConfigMap", "Secret") and old.get("immutable") and (old.get("data") != new.get("data")):
        raise refusal(
            422, "Invalid", f'{kind} "{name}" is invalid: data: Forbidden: field is immutable when `immutable` is set'
        )


def _forbidden(kind: str, fixed: list[str]) -> str:
    """As the server words it."""
    if kind == "Job":
        return ", ".join(f"spec.{key}: Invalid value: field is immutable" for key in fixed)
    allowed = ", ".join(f"'{key}'" for key in sorted(MUTABLE_SPEC[kind]))
    text = f"spec: Forbidden: updates to {kind.lower()} spec for fields other than {allowed} are forbidden"
    return f"{text} (changed: {', '.join(fixed)})"


def check_pod(namespace: Object, pod: Object, name: str) -> None:
    """Raises: Refusal: 422: it is no valid pod; 403: the namespace enforces what the pod breaks."""
    if wrong := list(pod_errors({**pod, "metadata": {**pod.get("metadata", {}), "name": name}})):
        raise refusal(422, "Invalid", f'Pod "{name}" is invalid: {", ".join(wrong)}')
    level = (namespace["metadata"].get("labels") or {}).get(ENFORCE, "privileged")
    broken = list(violations(pod["spec"])) if level == "restricted" else []
    if broken:
        raise refusal(
            403,
            "Forbidden",
            f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {", ".join(broken)}',
        )
    if outside := list(_outside(pod["spec"], (namespace["metadata"].get("annotations") or {}).get(UID_RANGE, ""))):
        text = f"unable to validate against any security context constraint: [{', '.join(outside)}]"
        raise refusal(403, "Forbidden", f'pods "{name}" is forbidden: {text}')


def _outside(spec: Object, uid_range: str) -> Iterator[str]:
    """The ids that the constraint `restricted-v2` of a project refuses; none: it is no project."""
    first, _, number = uid_range.partition("/")
    allowed = range(int(first or 0), int(first or 0) + int(number or 0))
    contexts = [spec.get("securityContext") or {}, *(c.get("securityContext") or {} for c in spec["containers"])]
    for context in contexts if allowed else []:
        for key in sorted({"fsGroup", "runAsUser"} & set(context)):
            if context[key] not in allowed:
                text = f"must be in the ranges: [{allowed[0]}, {allowed[-1]}]"
                yield f"provider restricted-v2: .spec.securityContext.{key}: Invalid value: {context[key]}: {text}"


def violations(spec: Mapping[str, Any]) -> Iterator[str]:
    """What the level `restricted` does not allow in a pod's spec, worded as the server words it."""
    context = spec.get("securityContext") or {}
    if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
        yield "host namespaces"
    for volume in spec.get("volumes", []):
        if kinds := set(volume) - {"name"} - VOLUMES:
            yield f'restricted volume types (volume "{volume["name"]}" uses restricted volume type "{min(kinds)}")'
    if unsafe := sorted({each["name"] for each in context.get("sysctls", [])} - SAFE_SYSCTLS):
        yield f"forbidden sysctls ({', '.join(unsafe)})"
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        yield from _of_container(container, context)


def _of_container(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    own, name = container.get("securityContext") or {}, f'container "{container["name"]}"'
    capabilities = own.get("capabilities") or {}
    seccomp = own.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
    if own.get("privileged"):
        yield f"privileged ({name} must not set securityContext.privileged=true)"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"allowPrivilegeEscalation != false ({name} must set securityContext.allowPrivilegeEscalation=false)"
    if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f'unrestricted capabilities ({name} must set securityContext.capabilities.drop=["ALL"])'
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield f"runAsNonRoot != true (pod or {name} must set securityContext.runAsNonRoot=true)"
    if own.get("runAsUser", pod.get("runAsUser")) == 0:
        yield f"runAsUser=0 ({name} must not set runAsUser=0)"
    if seccomp not in ("RuntimeDefault", "Localhost"):
        allowed = '"RuntimeDefault" or "Localhost"'
        yield f"seccompProfile (pod or {name} must set securityContext.seccompProfile.type to {allowed})"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield f"hostPort ({name} uses a host port)"


def _at(obj: Any, path: str) -> Any:
    for key in path.split("."):
        obj = obj.get(key) if isinstance(obj, Mapping) else None
    return obj
