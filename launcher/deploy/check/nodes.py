"""Whether nodes offer what the pods of a run ask for, each and all: labels, taints, GPUs, CPUs, memory. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from launcher.deploy.overlay.kustomize import Manifest
from launcher.deploy.overlay.patches import GPU
from launcher.deploy.running.kinds import has_ended, templates
from tandem_config.problems import ConfigProblem, problem

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

    def without(self, pods: Sequence[Mapping[str, Any]]) -> "NodeRoom":
        """Return what is left besides those of these pods of this node that have not ended."""
        asked = [_asked(pod) for pod in pods if not has_ended(pod)]
        left = {name: room - sum(one.get(name, 0) for one in asked) for name, room in self.allocatable.items()}
        return replace(self, allocatable=left)


def node_problems(
    built: Sequence[Manifest], nodes: Sequence[NodeRoom], others: Sequence[Mapping[str, Any]]
) -> Iterator[ConfigProblem]:
    """List the pods that no node can take, and warn of those for which there is no room in all.

    Args:
        others: pods of the cluster that are not the run's.
    """
    by_node: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for pod in others:
        by_node[pod["spec"].get("nodeName", "")].append(pod)
    impossible = set()
    for name, template, _ in templates(built):
        asked = _asked(template)
        why, fitting = _fitting(template, asked, nodes)
        if not fitting:
            impossible.add(name)
            text = f"no node of {len(nodes)} can take its pods: {why}"
            advice = "--node-selector, --toleration, sizes.yaml; --offline if an autoscaler adds such nodes"
            yield problem(name, _written(asked), text, advice)
    for when, room in (
        ("if all nodes were empty", nodes),
        ("now, beside the pods of others", [node.without(by_node[node.name]) for node in nodes]),
    ):
        left_over = [(name, *entry) for name, entry in _left_over(built, room).items() if name not in impossible]
        for name, template, missing, pods, apart in left_over:
            asked = _asked(template)
            text = f"{missing} of {pods} pods find no room {when}: {apart or _free(template, asked, room)}"
            advice = "more nodes, a smaller run, or wait until others have ended"
            yield problem(name, _written(asked), text, advice, severity="warning")
        if left_over:
            return


def _free(template: Manifest, asked: Mapping[str, Decimal], nodes: Sequence[NodeRoom]) -> str:
    """Say how much there is of what pods lack most likely."""
    resource = GPU if asked.get(GPU) else "cpu"
    free = [node.allocatable[resource] for node in _fitting(template, {}, nodes)[1]]
    most = f"{_amount(resource, sum(free, Decimal(0)))} {resource}, at most {_amount(resource, max(free))} on one"
    return f"nodes that they may use have {most}"


def _left_over(built: Sequence[Manifest], nodes: Sequence[NodeRoom]) -> dict[str, tuple[Manifest, int, int, str]]:
    """Place a run's pods as the scheduler does.

    Returns: set -> its template, pods without a node, pods, and, where nodes have room, what they must be near; "".

    In order of creation, those that must be near others after these; near what they prefer, else where most is left.
    """
    room = {node.name: node for node in nodes}
    waiting = [(name, template) for name, template, pods in templates(built) for _ in range(pods)]
    placed: list[tuple[Manifest, NodeRoom]] = []
    stuck = False
    while waiting and not stuck:
        later = []
        for name, template in waiting:
            asked = _asked(template)
            fitting = [
                node for node in _fitting(template, asked, list(room.values()))[1] if _near(template, node, placed)
            ]
            if not fitting:
                later.append((name, template))
                continue
            best = max(
                fitting,
                key=lambda node: (_liked(template, node, placed), node.allocatable["cpu"], node.allocatable["memory"]),
            )
            placed.append((template, best))
            left = {name: amount - asked.get(name, 0) for name, amount in best.allocatable.items()}
            room[best.name] = replace(best, allocatable=left)
        stuck, waiting = len(later) == len(waiting), later
    counts = Counter(name for name, _ in waiting)
    return {
        name: (one, counts[name], pods, _apart(one, list(room.values())))
        for name, one, pods in templates(built)
        if counts[name]
    }


def _apart(template: Manifest, nodes: Sequence[NodeRoom]) -> str:
    """Say what no node is near, of those that have room for a pod; "": none has."""
    terms = [
        f"pods with {', '.join(f'{key}={text}' for key, text in term['labelSelector'].get('matchLabels', {}).items())} "
        f"by its label {term['topologyKey']}"
        for term in _terms(template, "required")
    ]
    has_room = _fitting(template, _asked(template), nodes)[1]
    return f"no node that has room is near {' and '.join(terms)}" if has_room else ""


def _near(template: Manifest, node: NodeRoom, placed: Sequence[tuple[Manifest, NodeRoom]]) -> bool:
    """Whether a node is near the pods that a pod must be near; a pod that it would count itself may be the first."""
    for term in _terms(template, "required"):
        peers = [where for one, where in placed if _selects(term, one)]
        domain = node.labels.get(term["topologyKey"])
        if domain is None or (
            not any(where.labels.get(term["topologyKey"]) == domain for where in peers)
            and (peers or not _selects(term, template))
        ):
            return False
    return True


def _liked(template: Manifest, node: NodeRoom, placed: Sequence[tuple[Manifest, NodeRoom]]) -> int:
    """Count the pods on a node that a pod prefers to be next to."""
    terms = [entry["podAffinityTerm"] for entry in _terms(template, "preferred")]
    return sum(where.name == node.name and any(_selects(term, one) for term in terms) for one, where in placed)


def _terms(template: Manifest, how: str) -> list[Manifest]:
    affinity = template["spec"].get("affinity", {}).get("podAffinity", {})
    return list(affinity.get(f"{how}DuringSchedulingIgnoredDuringExecution", []))


def _selects(term: Manifest, template: Manifest) -> bool:
    labels = template["metadata"].get("labels", {})
    return bool(term["labelSelector"].get("matchLabels", {}).items() <= labels.items())


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
