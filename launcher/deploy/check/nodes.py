"""Whether nodes offer what the pods of a run ask for: labels, taints, GPUs, CPUs, memory. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from launcher.deploy.live.kinds import templates
from launcher.deploy.new.kustomize import Manifest
from launcher.deploy.new.patches import GPU
from tandem_config.problems import ConfigProblem

_RESOURCES = (GPU, "cpu", "memory")
_KEEPS_PODS_OUT = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class NodeRoom:
    """A node: what it is labelled, what keeps pods out, what it has for pods."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]
    allocatable: Mapping[str, Decimal]

    @staticmethod
    def read(node: Mapping[str, Any]) -> "NodeRoom":
        """Read a Node."""
        spec, given = node.get("spec", {}), node.get("status", {}).get("allocatable", {})
        return NodeRoom(
            name=str(node["metadata"]["name"]),
            labels=node["metadata"].get("labels") or {},
            taints=[taint for taint in spec.get("taints") or [] if taint.get("effect") in _KEEPS_PODS_OUT],
            allocatable={name: parse_quantity(given.get(name, "0")) for name in _RESOURCES},
        )


def node_problems(built: Sequence[Manifest], nodes: Sequence[NodeRoom]) -> Iterator[ConfigProblem]:
    """List the pods that no node can take, and warn of those for which there is too little room in all."""
    for name, template, pods in templates(built):
        asked = _asked(template)
        why, fitting = _fitting(template, asked, nodes)
        if not fitting:
            yield ConfigProblem(
                key=name,
                value=_written(asked),
                message=f"no node of {len(nodes)} can take its pods: {why}",
                suggestion="--node-selector, --toleration, sizes.yaml; --offline if an autoscaler adds such nodes",
            )
            continue
        resource = GPU if asked.get(GPU) else "cpu"
        room = (
            sum(int(node.allocatable[resource] // asked[resource]) for node in fitting) if asked.get(resource) else pods
        )
        if room < pods:
            yield ConfigProblem(
                key=name,
                value=_written(asked),
                message=f"{pods} pods, but the {len(fitting)} nodes for them have room for {room}, were they empty",
                suggestion="more nodes, or a smaller run",
                severity="warning",
            )


def _fitting(
    template: Mapping[str, Any], asked: Mapping[str, Decimal], nodes: Sequence[NodeRoom]
) -> tuple[str, list[NodeRoom]]:
    """Return why no node fits, and those that do."""
    wanted = template["spec"].get("nodeSelector") or {}
    labelled = [node for node in nodes if wanted.items() <= node.labels.items()]
    if not labelled:
        return f"none is labelled {', '.join(f'{key}={value}' for key, value in wanted.items())}", []
    tolerations = template["spec"].get("tolerations") or []
    keeping = {
        node.name: taint
        for node in labelled
        for taint in node.taints
        if not any(_tolerates(t, taint) for t in tolerations)
    }
    allowed = [node for node in labelled if node.name not in keeping]
    if not allowed:
        taints = sorted({_taint(taint) for taint in keeping.values()})
        return f"the taints {', '.join(taints)} are not tolerated", []
    fitting = [node for node in allowed if all(node.allocatable[name] >= amount for name, amount in asked.items())]
    if fitting:
        return "", fitting
    for name in _RESOURCES:
        best = max(allowed, key=lambda node: node.allocatable[name])
        if name in asked and best.allocatable[name] < asked[name]:
            most = _amount(name, best.allocatable[name])
            return f"the most {name} of one is {most} ({best.name}){_hint(keeping)}", []
    return f"none has all of it{_hint(keeping)}", []


def _hint(keeping: Mapping[str, Mapping[str, str]]) -> str:
    """Name the taints that keep pods from the other nodes."""
    taints = sorted({_taint(taint) for taint in keeping.values()})
    return f"; {len(keeping)} more have taints that are not tolerated: {', '.join(taints)}" if taints else ""


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def _asked(template: Mapping[str, Any]) -> dict[str, Decimal]:
    """Sum up what the containers of a pod request."""
    found: dict[str, Decimal] = {}
    for container in template["spec"]["containers"]:
        resources = container.get("resources", {})
        requests = (resources.get("limits") or {}) | (resources.get("requests") or {})
        for name in _RESOURCES:
            if name in requests:
                found[name] = found.get(name, Decimal(0)) + parse_quantity(requests[name])
    return found


def _written(asked: Mapping[str, Decimal]) -> str:
    return ", ".join(f"{name} {_amount(name, asked[name])}" for name in _RESOURCES if name in asked)


def _amount(name: str, amount: Decimal) -> str:
    return f"{float(amount) / 2**30:.4g}Gi" if name == "memory" else f"{float(amount):.4g}"


def _taint(taint: Mapping[str, str]) -> str:
    value = taint.get("value", "")
    return f"{taint['key']}{f'={value}' if value else ''}:{taint['effect']}"
