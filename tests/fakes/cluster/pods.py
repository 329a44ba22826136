"""What an API server refuses of a pod that its object's schema lets pass; part of a FAKE.

Of ValidatePodCreate (kubernetes/pkg/apis/core/validation) what our pods, with a patch gone wrong, could meet: names and
labels, volumes and mounts, ports, variables, resources, selectors, tolerations, probes. As a server of 1.31 and newer,
it adds the pod's own values of matchLabelKeys to a term's labelSelector before it looks.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tests.fakes.cluster.store import Object

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_PORT = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9]|-(?=[a-z0-9]))*")
_VARIABLE = re.compile(r"[ -<>-~]+")
_FIELDS = {"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName"}
_FIELDS |= {"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"}
_EXPRESSIONS = {"In": True, "NotIn": True, "Exists": False, "DoesNotExist": False}
_OVERCOMMITTED = ("cpu", "memory", "ephemeral-storage")
_TERMS = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"


def pod_errors(pod: Object) -> Iterator[str]:
    """Yield `field: what is wrong`, as the server words it where it matters."""
    metadata, spec = pod["metadata"], pod["spec"]
    labels = metadata.get("labels") or {}
    if not _is(_SUBDOMAIN, metadata["name"], 253):
        yield f"metadata.name: Invalid value: {metadata['name']!r}"
    yield from _labels("metadata.labels", labels)
    yield from (
        f"metadata.annotations: Invalid value: {key!r}" for key in metadata.get("annotations") or {} if not _is_key(key)
    )
    for key in ("hostname", "subdomain"):
        if key in spec and not _is(_LABEL, spec[key], 63):
            yield f"spec.{key}: Invalid value: {spec[key]!r}: must be no more than 63 characters, a DNS label"
    for key in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
        if key in spec and not _is(_SUBDOMAIN, spec[key], 253):
            yield f"spec.{key}: Invalid value: {spec[key]!r}"
    if spec.get("restartPolicy", "Always") not in ("Always", "OnFailure", "Never"):
        yield f"spec.restartPolicy: Unsupported value: {spec['restartPolicy']!r}"
    if spec.get("terminationGracePeriodSeconds", 0) < 0:
        yield "spec.terminationGracePeriodSeconds: must be greater than or equal to 0"
    yield from _labels("spec.nodeSelector", spec.get("nodeSelector") or {})
    yield from _volumes(spec.get("volumes", []))
    yield from _containers(spec)
    yield from _affinity(spec, labels)
    yield from _spread(spec)
    yield from _tolerations(spec)
    sysctls = [entry["name"] for entry in (spec.get("securityContext") or {}).get("sysctls", [])]
    yield from _twice("spec.securityContext.sysctls", sysctls)


def _containers(spec: Object) -> Iterator[str]:
    if not spec.get("containers"):
        yield "spec.containers: Required value"
    volumes = {entry["name"] for entry in spec.get("volumes", [])}
    found = [*spec.get("initContainers", []), *spec.get("containers", [])]
    yield from _twice("spec.containers.name", [entry["name"] for entry in found])
    for entry in found:
        at = f"spec.containers[{entry['name']}]"
        if not _is(_LABEL, entry["name"], 63):
            yield f"{at}.name: Invalid value"
        if not entry.get("image") or entry["image"] != entry["image"].strip():
            yield f"{at}.image: Required value"
        yield from _mounts(at, entry.get("volumeMounts", []), volumes)
        yield from _ports(at, entry.get("ports", []))
        yield from _variables(at, entry)
        yield from _resources(f"{at}.resources", entry.get("resources") or {})
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            yield from _probe(f"{at}.{probe}", probe, entry.get(probe))


def _volumes(volumes: Iterable[Object]) -> Iterator[str]:
    yield from _twice("spec.volumes.name", [entry["name"] for entry in volumes])
    for entry in volumes:
        at = f"spec.volumes[{entry['name']}]"
        if not _is(_LABEL, entry["name"], 63):
            yield f"{at}.name: Invalid value"
        if len(set(entry) - {"name"}) != 1:
            yield f"{at}: must specify exactly one volume type"
        for kind, key in (("configMap", "name"), ("secret", "secretName"), ("persistentVolumeClaim", "claimName")):
            if kind in entry and not entry[kind].get(key):
                yield f"{at}.{kind}.{key}: Required value"
        limit = (entry.get("emptyDir") or {}).get("sizeLimit")
        if limit is not None and parse_quantity(limit) < 0:
            yield f"{at}.emptyDir.sizeLimit: Forbidden"


def _mounts(at: str, mounts: Iterable[Object], volumes: set[str]) -> Iterator[str]:
    for path, times in Counter(mount["mountPath"] for mount in mounts).items():
        if times > 1:
            yield f"{at}.volumeMounts.mountPath: Invalid value: {path!r}: must be unique"
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"{at}.volumeMounts.name: Not found: {mount['name']!r}"
        if mount.get("subPath", "").startswith("/") or ".." in mount.get("subPath", "").split("/"):
            yield f"{at}.volumeMounts.subPath: Invalid value: {mount['subPath']!r}"


def _ports(at: str, ports: Iterable[Object]) -> Iterator[str]:
    yield from _twice(f"{at}.ports.name", [port["name"] for port in ports if "name" in port])
    for port in ports:
        if "name" in port and not _is(_PORT, port["name"], 15):
            yield f"{at}.ports.name: Invalid value: {port['name']!r}: must be no more than 15 characters"
        if not 0 < port["containerPort"] < 65536:
            yield f"{at}.ports.containerPort: Invalid value: {port['containerPort']}"


def _variables(at: str, container: Object) -> Iterator[str]:
    for entry in container.get("env", []):
        source = entry.get("valueFrom")
        if not _VARIABLE.fullmatch(entry["name"]):
            yield f"{at}.env.name: Invalid value: {entry['name']!r}"
        if source is not None and (entry.get("value") or len(source) != 1):
            yield f"{at}.env[{entry['name']}].valueFrom: Invalid value: may not be specified when `value` is not empty"
        path = ((source or {}).get("fieldRef") or {}).get("fieldPath", "metadata.name")
        subscript = re.fullmatch(r"metadata\.(?:labels|annotations)\['(.+)'\]", path)
        if path not in _FIELDS and (subscript is None or not _is_key(subscript[1])):
            yield f"{at}.env[{entry['name']}].valueFrom.fieldRef.fieldPath: Invalid value: {path!r}"
    for entry in container.get("envFrom", []):
        if len(set(entry) - {"prefix"}) != 1:
            yield f"{at}.envFrom: must specify one of: `configMapRef` or `secretRef`"


def _resources(at: str, resources: Mapping[str, Any]) -> Iterator[str]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name in {**limits, **requests}:
        of = "/" in name
        asked = parse_quantity(requests.get(name, limits.get(name)))
        most = parse_quantity(limits[name]) if name in limits else None
        if not of and name not in _OVERCOMMITTED and not name.startswith("hugepages-"):
            yield f"{at}: Invalid value: {name!r}: must be a standard resource type or fully qualified"
        if most is not None and asked > most:
            yield f"{at}.requests: Invalid value: {asked}: must be less than or equal to {name} limit of {most}"
        if of and (most is None or asked != most or asked != int(asked)):
            yield f"{at}.requests[{name}]: must be an integer, equal to the limit: over-commit is not allowed"
        if asked < 0:
            yield f"{at}: Invalid value: {name!r}: must be greater than or equal to 0"


def _probe(at: str, kind: str, probe: Object | None) -> Iterator[str]:
    if probe is None:
        return
    if len({"exec", "grpc", "httpGet", "tcpSocket"} & set(probe)) != 1:
        yield f"{at}: must specify exactly one handler type"
    if kind != "readinessProbe" and probe.get("successThreshold", 1) != 1:
        yield f"{at}.successThreshold: Invalid value: must be 1"
    if any(probe.get(key, 1) < 1 for key in ("periodSeconds", "timeoutSeconds", "failureThreshold")):
        yield f"{at}: Invalid value: must be greater than or equal to 1"


def _affinity(spec: Object, labels: Mapping[str, str]) -> Iterator[str]:
    affinity = spec.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        for how in _TERMS:
            for index, entry in enumerate((affinity.get(kind) or {}).get(how, [])):
                at = f"spec.affinity.{kind}.{how}[{index}]"
                term = entry.get("podAffinityTerm", entry)
                if "podAffinityTerm" in entry:
                    at += ".podAffinityTerm"
                    if not 1 <= entry["weight"] <= 100:
                        yield f"{at}.weight: Invalid value: {entry['weight']}: must be in the range 1-100"
                yield from _term(at, term, labels)


def _spread(spec: Object) -> Iterator[str]:
    spread = spec.get("topologySpreadConstraints", [])
    yield from _twice(
        "spec.topologySpreadConstraints", [f"{t['topologyKey']}, {t['whenUnsatisfiable']}" for t in spread]
    )
    for index, term in enumerate(spread):
        at = f"spec.topologySpreadConstraints[{index}]"
        if term.get("maxSkew", 0) < 1:
            yield f"{at}.maxSkew: Invalid value: {term.get('maxSkew')}: must be greater than zero"
        if "minDomains" in term and term["whenUnsatisfiable"] != "DoNotSchedule":
            yield f"{at}.minDomains: Invalid value: can only use minDomains if whenUnsatisfiable=DoNotSchedule"
        own = _keys(term.get("labelSelector") or {})
        for key in term.get("matchLabelKeys", []):
            if key in own:
                yield f"{at}.matchLabelKeys: Invalid value: {key!r}: exists in both matchLabelKeys and labelSelector"
        yield from _selector(at, term, [])


def _tolerations(spec: Object) -> Iterator[str]:
    for index, entry in enumerate(spec.get("tolerations", [])):
        operator = entry.get("operator", "Equal")
        if operator == "Exists" and entry.get("value"):
            yield f"spec.tolerations[{index}].operator: Invalid value: value must be empty when `operator` is 'Exists'"
        if not entry.get("key") and operator != "Exists":
            yield f"spec.tolerations[{index}].operator: Invalid value: must be Exists when `key` is empty"
        if "tolerationSeconds" in entry and entry.get("effect") != "NoExecute":
            yield f"spec.tolerations[{index}].effect: Invalid value: must be 'NoExecute' with `tolerationSeconds`"


def _term(at: str, term: Object, labels: Mapping[str, str]) -> Iterator[str]:
    """A term of podAffinity or podAntiAffinity."""
    match, mismatch = term.get("matchLabelKeys", []), term.get("mismatchLabelKeys", [])
    own = _keys(term.get("labelSelector") or {})
    for key in (*match, *mismatch):
        if key in labels and key in own:  # the server has added the pod's own value to the selector
            yield f"{at}[0]: Invalid value: {key!r}: exists in both matchLabelKeys and labelSelector"
    for key in set(match) & set(mismatch):
        yield f"{at}.matchLabelKeys: Invalid value: {key!r}: exists in both matchLabelKeys and mismatchLabelKeys"
    yield from _selector(at, term, [*match, *mismatch])


def _selector(at: str, term: Object, keys: Iterable[str]) -> Iterator[str]:
    if not _is_key(term.get("topologyKey", "")):
        yield f"{at}.topologyKey: Required value: can not be empty"
    if (keys or term.get("matchLabelKeys")) and "labelSelector" not in term:
        yield f"{at}.matchLabelKeys: Forbidden: must not be specified when labelSelector is not set"
    yield from (f"{at}.matchLabelKeys: Invalid value: {key!r}" for key in keys if not _is_key(key))
    selector = term.get("labelSelector") or {}
    yield from _labels(f"{at}.labelSelector.matchLabels", selector.get("matchLabels") or {})
    for entry in selector.get("matchExpressions", []):
        values = entry.get("values", [])
        if entry["operator"] not in _EXPRESSIONS or bool(values) is not _EXPRESSIONS[entry["operator"]]:
            yield f"{at}.labelSelector.matchExpressions.values: {entry['key']}: {entry['operator']} with {values}"
        yield from _labels(f"{at}.labelSelector.matchExpressions", dict.fromkeys([entry["key"]], ""))
        yield from (
            f"{at}.labelSelector.matchExpressions: Invalid value: {v!r}" for v in values if not _is(_VALUE, v, 63)
        )


def _keys(selector: Object) -> set[str]:
    return {*selector.get("matchLabels", {}), *(entry["key"] for entry in selector.get("matchExpressions", []))}


def _labels(at: str, labels: Mapping[str, str]) -> Iterator[str]:
    for key, value in labels.items():
        if not _is_key(key):
            yield f"{at}: Invalid value: {key!r}"
        if not _is(_VALUE, value, 63):
            yield f"{at}: Invalid value: {value!r}: must be no more than 63 characters, as of a label"


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    return bool(name) and _is(_VALUE, name, 63) and (not slash or _is(_SUBDOMAIN, prefix, 253))


def _is(pattern: re.Pattern[str], text: str, longest: int) -> bool:
    return pattern.fullmatch(text) is not None and len(text) <= longest


def _twice(at: str, names: Iterable[str]) -> Iterator[str]:
    yield from (f"{at}: Duplicate value: {name!r}" for name, times in Counter(names).items() if times > 1)
